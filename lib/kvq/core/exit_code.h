#pragma once

#include <span>
#include <string_view>

namespace kvq {

/// Exit codes of all tools and scripts. python/kvq/errors.py and docs/cli.md have the same table; a test compares them.
enum class ExitCode {
  done = 0,
  bug = 1,
  usage = 2,
  input = 3,
  numerical = 4,
  unsupported = 5,
  check_failed = 6,
  interrupted = 130,
};

struct ExitCodeRow {
  ExitCode code;
  std::string_view meaning;
};

/// All codes with their meanings, ascending, for help texts and manual pages.
std::span<const ExitCodeRow> exit_codes();

constexpr int to_int(ExitCode code) { return static_cast<int>(code); }

}  // namespace kvq
