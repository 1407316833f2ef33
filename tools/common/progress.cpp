#include "common/progress.h"

#include "common/say.h"
#include "common/table.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

namespace kvq {

Progress::Progress(double total_work, bool quiet)
    : total_(std::max(total_work, 1.0)),
      quiet_(quiet),
      terminal_(isatty(STDERR_FILENO) == 1),
      start_(Clock::now()),
      last_(start_) {}

Progress::~Progress() { finish(); }

void Progress::update(double done, const std::string& what) {
  if (quiet_) return;
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  const std::chrono::duration<double> since_last = now - last_, elapsed = now - start_;
  if (since_last.count() < (terminal_ ? 0.1 : 10.0)) return;
  last_ = now;
  const double part = std::clamp(done / total_, 0.0, 1.0);
  const std::string left = part > 0.01 ? format_seconds(elapsed.count() * (1.0 - part) / part) + " left" : "";
  const std::string line = fmt::format("{:3.0f}%  {}  {}", 100.0 * part, what, left);
  say(fmt::format("{}{}{}", terminal_ ? "\r\x1b[K" : "", line, terminal_ ? "" : "\n"));
  visible_ = terminal_;
}

void Progress::finish() {
  const std::lock_guard lock(mutex_);
  if (visible_) say("\r\x1b[K");
  visible_ = false;
}

}  // namespace kvq
