#pragma once

#include <nlohmann/json.hpp>

#include <string>
#include <string_view>

namespace kvq {

using Json = nlohmann::json;

/// Limits on hostile JSON, checked while parsing.
struct JsonLimits {
  std::size_t max_bytes = 64u << 20;
  int max_depth = 64;
  std::size_t max_values = 8u << 20;  ///< in memory a value takes far more than its two or more bytes of text
};

/// Parses strict JSON: no comments, no duplicate keys, no NaN, nothing behind the value, valid UTF-8.
/// @param where  names the source in the message, for example "out.safetensors: kvq.manifest"
/// @throws       Error{bad_input}
Json parse_json(std::string_view text, std::string_view where, const JsonLimits& limits = {});

/// Canonical text: sorted keys, no white space, shortest round-trip numbers. Equal values give equal bytes. The same
/// bytes as Python's json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).
/// @throws Error{internal} if a number is not finite or a string is not UTF-8
std::string canonical_json(const Json& value);

/// Checks `value` against a JSON schema (draft 7, compiled into the program). Patterns of the schema must be bounded:
/// {0,n} in place of * and +.
/// @throws Error{bad_input} with the path of the first fault and what was expected there
void check_schema(const Json& value, const Json& schema, std::string_view where);

}  // namespace kvq
