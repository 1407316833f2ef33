#pragma once

#include <kvq/core/error.h>

#include <optional>
#include <string>
#include <utility>

namespace kvq::test {

/// The kvq::Error that `action` throws, or none. Other exceptions pass through.
template <typename Action>
std::optional<Error> error_of(Action&& action) {
  try {
    std::forward<Action>(action)();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

/// Text of the kvq::Error that `action` throws, such as "bad_input: a.h5: ...", or "no error"; for REQUIRE_THAT(...,
/// Contains(...)).
template <typename Action>
std::string error_text(Action&& action) {
  const auto error = error_of(std::forward<Action>(action));
  if (!error) return "no error";
  const char* kinds[] = {"internal", "usage", "bad_input", "numerical", "unsupported", "check_failed", "io"};
  return std::string(kinds[static_cast<int>(error->kind())]) + ": " + error->what();
}

}  // namespace kvq::test
