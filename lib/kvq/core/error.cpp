#include <kvq/core/error.h>

namespace kvq {

int exit_code(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::internal: return 1;
    case ErrorKind::usage: return 2;
    case ErrorKind::bad_input:
    case ErrorKind::io: return 3;
    case ErrorKind::numerical: return 4;
    case ErrorKind::unsupported: return 5;
    case ErrorKind::check_failed: return 6;
  }
  return 1;
}

void detail::assertion_failed(const char* expression, const char* file, int line) {
  throw Error{ErrorKind::internal, fmt::format("bug: {} does not hold at {}:{}", expression, file, line)};
}

}  // namespace kvq
