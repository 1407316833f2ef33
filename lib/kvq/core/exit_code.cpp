#include <kvq/core/exit_code.h>

#include <array>

namespace kvq {

std::span<const ExitCodeRow> exit_codes() {
  static constexpr std::array<ExitCodeRow, 8> rows{{
      {ExitCode::done, "done, every check passed"},
      {ExitCode::bug, "a bug in kvq"},
      {ExitCode::usage, "wrong flags or arguments"},
      {ExitCode::input,
       "a file is unreadable, malformed, inconsistent or of another model, or the system refused (disk full, "
       "permission)"},
      {ExitCode::numerical, "numerical failure: NaN in the data, not converged"},
      {ExitCode::unsupported, "unsupported: a version, feature, model or GPU that this build does not know"},
      {ExitCode::check_failed, "a check failed"},
      {ExitCode::interrupted, "interrupted"},
  }};
  return rows;
}

}  // namespace kvq
