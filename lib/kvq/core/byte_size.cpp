#include <kvq/core/byte_size.h>
#include <kvq/core/error.h>
#include <kvq/core/text.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <optional>
#include <string_view>

namespace kvq {

namespace {

/// Bytes of a unit in small letters.
std::optional<double> bytes_of_unit(std::string_view unit) {
  constexpr std::string_view kPrefixes = "kmgt";
  if (unit.empty() || unit == "b") return 1.0;
  const std::size_t power = kPrefixes.find(unit.front());
  if (power == std::string_view::npos) return {};
  const std::string_view rest = unit.substr(1);
  if (rest == "b") return std::pow(1000.0, static_cast<double>(power + 1));
  if (rest == "ib") return std::pow(1024.0, static_cast<double>(power + 1));
  return {};
}

}  // namespace

std::int64_t parse_byte_size(const std::string& text, const std::string& flag) {
  const char* const end = text.data() + text.size();
  double number = 0.0;
  const auto [rest, fault] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  std::string unit(rest, end);
  if (unit.starts_with(' ')) unit.erase(0, 1);
  std::transform(unit.begin(), unit.end(), unit.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const std::optional<double> factor = fault == std::errc{} ? bytes_of_unit(unit) : std::nullopt;
  const double bytes = factor ? std::floor(number * *factor) : 0.0;
  if (!(bytes >= 1.0 && bytes <= 9e18))
    throw Error{ErrorKind::usage, fmt::format("{}: expected a size such as 4GB, 512MiB or 80000000, found {}", flag,
                                              printable(text, 40))};
  return static_cast<std::int64_t>(bytes);
}

}  // namespace kvq
