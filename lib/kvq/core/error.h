#pragma once

#include <fmt/core.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace kvq {

/// Kinds of errors to which a caller can react differently. exit_code() maps each kind to a process exit code.
enum class ErrorKind {
  internal,      ///< a bug in kvq
  usage,         ///< wrong flags or arguments
  bad_input,     ///< unreadable, malformed or inconsistent file
  numerical,     ///< NaN in the data, not converged, no energy
  unsupported,   ///< a version, feature or geometry that this build does not know
  check_failed,  ///< a check that the user asked for did not hold
  io,            ///< the system refused: disk full, permission, no such file
};

/// The exception of all offline code: a kind, one line that names the expected value, the found value and the place,
/// and a hint if there is a next step.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, std::string hint = {})
      : std::runtime_error(message), kind_(kind), hint_(std::move(hint)) {}
  ErrorKind kind() const noexcept { return kind_; }
  const std::string& hint() const noexcept { return hint_; }

 private:
  ErrorKind kind_;
  std::string hint_;
};

/// Process exit code of an error: 1 bug, 2 usage, 3 file, 4 numerical, 5 unsupported, 6 check failed.
int exit_code(ErrorKind kind) noexcept;

namespace detail {
[[noreturn]] void assertion_failed(const char* expression, const char* file, int line);
}

}  // namespace kvq

/// Checks a condition that only a bug in kvq can break, never user input. Stays on in release builds; throws
/// Error{internal}.
#define KVQ_ASSERT(expression) \
  ((expression) ? void(0) : ::kvq::detail::assertion_failed(#expression, __FILE__, __LINE__))
