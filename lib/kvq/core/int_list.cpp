#include <kvq/core/error.h>
#include <kvq/core/int_list.h>

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace kvq {

std::vector<int> parse_int_list(const std::string& text, const char* flag) {
  const auto bad = [&] {
    return Error{ErrorKind::usage, fmt::format("{}: expected a list such as 0-3,7, found \"{}\"", flag, text)};
  };
  std::vector<int> values;
  const char* at = text.data();
  const char* end = at + text.size();
  while (true) {
    int first = 0;
    auto parsed = std::from_chars(at, end, first);
    if (parsed.ec != std::errc{} || first < 0) throw bad();
    int last = first;
    if (parsed.ptr != end && *parsed.ptr == '-') parsed = std::from_chars(parsed.ptr + 1, end, last);
    if (parsed.ec != std::errc{} || last < first || last > 4095) throw bad();
    for (int value = first; value <= last; ++value) values.push_back(value);
    if (parsed.ptr == end) break;
    if (*parsed.ptr != ',') throw bad();
    at = parsed.ptr + 1;
  }
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

}  // namespace kvq
