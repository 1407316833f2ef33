#include "common/decimal.h"

#include <kvq/core/text.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>

namespace kvq {

namespace {

std::string_view without_sign(std::string_view text) { return text.substr(text.starts_with('-') ? 1 : 0); }

bool has_only_digits(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

/// CLI11 names the type of an option by the type of its variable.
bool takes_integers(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  return type.starts_with("INT") || type.starts_with("UINT");
}

/// CLI11 takes a number beyond 64 bits for the nearest one that it knows.
bool fits(std::string_view decimal) {
  std::int64_t value = 0;
  return std::from_chars(decimal.data(), decimal.data() + decimal.size(), value).ec == std::errc{};
}

std::string refusal(const std::string& text) {
  if (!is_decimal(text)) return decimal_fault(text);
  return fits(text) ? std::string() : "expected an integer from -2^63 to 2^63 - 1, found " + printable(text, 40);
}

}  // namespace

bool has_leading_zeros(std::string_view text) {
  text = without_sign(text);
  return has_only_digits(text) && text.size() > 1 && text[0] == '0';
}

bool is_decimal(std::string_view text) { return has_only_digits(without_sign(text)) && !has_leading_zeros(text); }

std::string decimal_fault(std::string_view text) {
  if (is_decimal(text)) return {};
  return std::string("expected a decimal integer without leading zeros") +
         (has_leading_zeros(text) ? ", which could mean octal" : "") + ", found " + printable(text, 40);
}

void require_decimal_integers(CLI::App& app) {
  for (CLI::Option* option : app.get_options())
    if (takes_integers(*option)) option->transform(CLI::Validator([](std::string& text) { return refusal(text); }, ""));
  for (CLI::App* subcommand : app.get_subcommands([](const CLI::App*) { return true; }))
    require_decimal_integers(*subcommand);
}

}  // namespace kvq
