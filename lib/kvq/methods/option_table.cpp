#include <kvq/core/error.h>
#include <kvq/methods/option_table.h>
#include <kvq/methods/shared_options.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace kvq {

namespace {

bool has_flag(const std::vector<OptionSpec>& rows, const std::string& flag) {
  return std::any_of(rows.begin(), rows.end(), [&](const OptionSpec& row) { return row.text.flag == flag; });
}

bool has_flag(const Method& method, const std::string& flag) { return has_flag(method.options, flag); }

std::vector<OptionSpec> make_table() {
  std::vector<OptionSpec> all = storage_options();
  for (const Method& method : methods())
    for (const OptionSpec& row : method.options)
      if (!row.text.flag.empty() && !has_flag(all, row.text.flag)) all.push_back(row);
  for (OptionSpec& row : centroid_options()) all.push_back(std::move(row));
  return all;
}

/// A result does not show that a flag was ignored, so such a flag is refused.
void refuse_foreign_flags(const Method& method, const GivenOptions& given) {
  for (const Method& row : methods())
    for (const OptionSpec& spec : row.options) {
      const std::string& flag = spec.text.flag;
      if (given.has(flag) && !has_flag(method, flag))
        refuse_flag(flag, method, [&](const Method& other) { return has_flag(other, flag); });
    }
}

/// The flag that set a value of one side: the side's own flag, such as --bits-k, if it was typed, else --bits.
std::string typed_flag(const GivenOptions& given, const char* flag, Side side) {
  const std::string own = own_side_flag(flag, side);
  return given.has(own) ? own : flag;
}

}  // namespace

const std::vector<OptionSpec>& option_table() {
  static const std::vector<OptionSpec> table = make_table();
  return table;
}

std::vector<OptionSpec> options_of(const Method& method) {
  std::vector<OptionSpec> all = storage_options();
  all.insert(all.end(), method.options.begin(), method.options.end());
  for (OptionSpec& row : centroid_options()) all.push_back(std::move(row));
  return all;
}

void refuse_flag(const std::string& flag, const Method& method, const std::function<bool(const Method&)>& has) {
  std::vector<std::string> owners;
  for (const Method& row : methods())
    if (has(row)) owners.push_back(row.name);
  throw Error{ErrorKind::usage, fmt::format("{} has no meaning for --method {}", flag, method.name),
              fmt::format("it belongs to {}", fmt::join(owners, " and "))};
}

Options resolve_options(const Method& method, const GivenOptions& given) {
  Options defaults;
  defaults.method = method.name;
  method.set_defaults(defaults);
  refuse_foreign_flags(method, given);
  const std::vector<OptionSpec> rows = options_of(method);
  for (const OptionSpec& row : rows)
    if (const OptionValue* value = given.find(row.text.flag)) check_value(row, *value);
  Options options = defaults;
  for (const OptionSpec& row : rows)
    if (const OptionValue* value = given.find(row.text.flag); value && row.set) row.set(options, *value);
  settle_shared(options, defaults, given);
  if (method.settle) method.settle(method, options, given);
  check_options(method, options, [&given](const char* flag, Side side) { return typed_flag(given, flag, side); });
  return options;
}

void check_options(const Method& method, const Options& options, const SideFlag& flag_of) {
  check_contradictions(options, flag_of);
  for (const OptionSpec& row : options_of(method))
    if (row.check) row.check(options);
}

void check_options(const Options& options) { check_options(find_method(options.method), options); }

Json options_to_json(const Method& method, const Options& options) {
  Json json;
  for (const OptionSpec& row : options_of(method))
    if (row.write) row.write(options, json);
  for (const OptionSpec& row : option_table())
    if (row.write && row.every_method) row.write(options, json);
  return json;
}

namespace {

/// Removes from `options` what `surplus` has, inside of sides, too.
void remove_keys(const Json& surplus, Json& options) {
  for (const auto& [key, value] : surplus.items()) {
    if (!options.contains(key)) continue;
    if (value.is_object() && options[key].is_object())
      remove_keys(value, options[key]);
    else
      options.erase(key);
  }
}

/// What options of a side do not decide anything beside its coder.
void remove_unused(Json& side, bool has_budget) {
  if (side.value("coder", "") != "affine") side.erase("zero");
  if (side.value("scale_rule", "") != "minmax") side.erase("clip");
  if (side.value("group_size", 0) == 0) side.erase("group_size");
  if (has_budget) side.erase("bits");
}

}  // namespace

Json used_options(const std::string& method_name, Json options) {
  const auto method =
      std::find_if(methods().begin(), methods().end(), [&](const Method& row) { return row.name == method_name; });
  if (method == methods().end()) return options;
  const std::vector<OptionSpec> own = options_of(*method);
  for (const OptionSpec& row : option_table()) {
    if (!row.write || !row.every_method || has_flag(own, row.text.flag)) continue;
    Json surplus = Json::object();
    row.write(Options{}, surplus);
    remove_keys(surplus, options);
  }
  const bool has_budget = options.contains("budget_bits") || options.contains("budget_bytes");
  for (const Side side : kSides)
    if (options.contains(name(side)) && options[name(side)].is_object()) remove_unused(options[name(side)], has_budget);
  return options;
}

Json options_to_json(const Options& options) { return options_to_json(find_method(options.method), options); }

}  // namespace kvq
