#include <kvq/core/error.h>
#include <kvq/core/exit_code.h>

namespace kvq {

namespace {

ExitCode code_of(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::internal: return ExitCode::bug;
    case ErrorKind::usage: return ExitCode::usage;
    case ErrorKind::bad_input:
    case ErrorKind::io: return ExitCode::input;
    case ErrorKind::numerical: return ExitCode::numerical;
    case ErrorKind::unsupported: return ExitCode::unsupported;
    case ErrorKind::check_failed: return ExitCode::check_failed;
  }
  return ExitCode::bug;
}

}  // namespace

int exit_code(ErrorKind kind) noexcept { return to_int(code_of(kind)); }

void detail::assertion_failed(const char* expression, const char* file, int line) {
  throw Error{ErrorKind::internal, fmt::format("bug: {} does not hold at {}:{}", expression, file, line)};
}

}  // namespace kvq
