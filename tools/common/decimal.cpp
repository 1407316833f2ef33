#include "common/decimal.h"

#include <kvq/core/text.h>

#include <algorithm>
#include <string>

namespace kvq {

bool is_decimal(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  const bool digits =
      !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  return digits && (text.size() == 1 || text[0] != '0');
}

namespace {

/// CLI11 names the type of an option by the type of its variable.
bool takes_integers(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  return type.starts_with("INT") || type.starts_with("UINT");
}

std::string refusal(const std::string& text) {
  return is_decimal(text) ? std::string()
                          : "expected a decimal integer without leading zeros, found " + printable(text, 40);
}

}  // namespace

void require_decimal_integers(CLI::App& app) {
  for (CLI::Option* option : app.get_options())
    if (takes_integers(*option)) option->transform(CLI::Validator([](std::string& text) { return refusal(text); }, ""));
  for (CLI::App* subcommand : app.get_subcommands([](const CLI::App*) { return true; }))
    require_decimal_integers(*subcommand);
}

}  // namespace kvq
