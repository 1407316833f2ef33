#include <kvq/core/error.h>
#include <kvq/core/suggestion.h>
#include <kvq/methods/recipes.h>

#include <array>

namespace kvq {

std::span<const Method> methods() {
  static const std::array<Method, 8> rows = {oscar_method(),  saw_int4_method(), block_gtq_method(), kvq_method(),
                                             tq_mse_method(), quarot_method(),   random_method(),    plain_method()};
  return rows;
}

const Method& find_method(const std::string& name) {
  std::vector<std::string> names;
  for (const Method& row : methods()) {
    if (row.name == name) return row;
    names.push_back(row.name);
  }
  throw Error{ErrorKind::usage, fmt::format("--method: unknown \"{}\"", name), hint_of_names(name, names)};
}

}  // namespace kvq
