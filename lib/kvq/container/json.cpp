#include <kvq/container/json.h>

#include <kvq/core/error.h>
#include <kvq/core/text.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace kvq {
namespace {

[[noreturn]] void reject(std::string_view where, const std::string& what) {
  throw Error{ErrorKind::bad_input, fmt::format("{}: {}", where, what)};
}

/// Builds the value from the parser's events, and refuses duplicate keys and exceeded limits. nlohmann-json's own DOM
/// parser has no limits and keeps the last of several equal keys; an attacker could use duplicate keys to make two
/// readers understand one file differently.
class LimitedBuilder {
 public:
  LimitedBuilder(std::string_view where, const JsonLimits& limits) : where_(where), limits_(limits) {}

  Json take() { return std::move(root_); }

  bool null() { return scalar(nullptr); }
  bool boolean(bool value) { return scalar(value); }
  bool number_integer(Json::number_integer_t value) { return scalar(value); }
  bool number_unsigned(Json::number_unsigned_t value) { return scalar(value); }
  bool number_float(Json::number_float_t value, const std::string&) { return scalar(value); }
  bool string(std::string& value) { return scalar(std::move(value)); }
  bool binary(Json::binary_t&) { return false; }  // JSON text has no binary values
  bool start_object(std::size_t) { return open(Json::object()); }
  bool start_array(std::size_t) { return open(Json::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }

  bool key(std::string& name) {
    const auto [place, is_new] = open_.back()->get_ref<Json::object_t&>().emplace(name, nullptr);
    if (!is_new) reject(where_, fmt::format("not valid JSON: the key '{}' appears twice", printable(name)));
    pending_ = &place->second;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) {
    std::string_view what = error.what();  // "[json.exception.parse_error.101] parse error at ..."
    if (const auto tag_end = what.find("] "); tag_end != what.npos) what.remove_prefix(tag_end + 2);
    reject(where_, fmt::format("not valid JSON at byte {}: {}", position, printable(what, 200)));
  }

 private:
  template <typename T>
  bool scalar(T&& value) {
    place(Json(std::forward<T>(value)));
    return true;
  }

  /// Stores a value at the current position: the root, behind the pending key, or at the end of the open array.
  Json* place(Json&& value) {
    if (++num_values_ > limits_.max_values)
      reject(where_, fmt::format("JSON has more than {} values", limits_.max_values));
    Json* target = &root_;
    if (pending_ != nullptr) {
      target = std::exchange(pending_, nullptr);
    } else if (!open_.empty()) {
      auto& array = open_.back()->get_ref<Json::array_t&>();
      array.emplace_back();
      target = &array.back();
    }
    *target = std::move(value);
    return target;
  }

  bool open(Json&& container) {
    if (std::cmp_greater_equal(open_.size(), limits_.max_depth))
      reject(where_, fmt::format("JSON is nested deeper than {} levels", limits_.max_depth));
    open_.push_back(place(std::move(container)));
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view where_;
  JsonLimits limits_;
  Json root_;
  std::vector<Json*> open_;  ///< open containers, root first; only the last one grows, so pointers stay valid
  Json* pending_ = nullptr;  ///< value of the key just read
  std::size_t num_values_ = 0;
};

/// The shortest digits that read back as `value`, laid out as Python's repr does: 0.0001, 1e-05, 100000.0, 1e+16.
std::string number_text(double value) {
  char buffer[32];
  const auto [end, status] =
      std::to_chars(buffer, buffer + sizeof buffer, std::abs(value), std::chars_format::scientific);
  KVQ_ASSERT(status == std::errc{});
  const std::string_view scientific(buffer, static_cast<std::size_t>(end - buffer));
  const auto e = scientific.find('e');
  std::string digits(scientific.substr(0, e));
  if (digits.size() > 1) digits.erase(1, 1);  // the point
  const auto num_digits = static_cast<int>(digits.size());
  int exponent = 0;
  std::from_chars(buffer + e + (scientific[e + 1] == '+' ? 2 : 1), end, exponent);

  const std::string sign = std::signbit(value) ? "-" : "";
  if (exponent < -4 || exponent >= 16) {
    if (num_digits > 1) digits.insert(1, 1, '.');
    return fmt::format("{}{}e{}{:02}", sign, digits, exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0)
    return fmt::format("{}0.{}{}", sign, std::string(static_cast<std::size_t>(-exponent - 1), '0'), digits);
  const auto point = static_cast<std::size_t>(exponent) + 1;
  if (digits.size() <= point) digits.append(point - digits.size() + 1, '0');
  return sign + digits.insert(point, 1, '.');
}

void append_canonical(const Json& value, std::string& out) {
  switch (value.type()) {
    case Json::value_t::object: {
      char separator = '{';
      for (const auto& [key, child] : value.items()) {  // a std::map, so the keys come sorted
        out += std::exchange(separator, ',');
        append_canonical(key, out);
        out += ':';
        append_canonical(child, out);
      }
      out += separator == '{' ? "{}" : "}";
      return;
    }
    case Json::value_t::array: {
      char separator = '[';
      for (const Json& child : value) {
        out += std::exchange(separator, ',');
        append_canonical(child, out);
      }
      out += separator == '[' ? "[]" : "]";
      return;
    }
    case Json::value_t::number_float:
      if (!std::isfinite(value.get<double>()))
        throw Error{ErrorKind::internal, "bug: a number that is not finite in canonical JSON"};
      out += number_text(value.get<double>());
      return;
    default: out += value.dump();
  }
}

}  // namespace

Json parse_json(std::string_view text, std::string_view where, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes)
    reject(where, fmt::format("JSON of {} bytes, expected at most {}", text.size(), limits.max_bytes));
  // The parser would take a zero byte for the end and skip a byte order mark; JSON text must not contain either.
  if (const auto zero = text.find('\0'); zero != text.npos)
    reject(where, fmt::format("not valid JSON at byte {}: zero byte", zero + 1));
  if (text.starts_with("\xef\xbb\xbf")) reject(where, "not valid JSON at byte 1: byte order mark");
  LimitedBuilder builder(where, limits);
  Json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

std::string canonical_json(const Json& value) {
  std::string text;
  try {
    append_canonical(value, text);
  } catch (const Json::type_error& error) {
    throw Error{ErrorKind::internal,
                fmt::format("bug: a string that is not UTF-8 in canonical JSON ({})", error.what())};
  }
  return text;
}

}  // namespace kvq
