#pragma once

#include <chrono>
#include <mutex>
#include <string>

namespace kvq {

/// Progress on stderr: one line that is rewritten on a terminal, a plain line every ten seconds elsewhere.
/// Work is counted in any unit that is proportional to time (here: floating-point operations).
class Progress {
 public:
  Progress(double total_work, bool quiet);
  ~Progress();
  /// Work done so far in all, and what is being worked on ("layer 3/36, 12400 tokens/s"). Callable from any thread.
  void update(double done, const std::string& what);
  /// Removes the line on a terminal.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  std::mutex mutex_;
  double total_;
  bool quiet_, terminal_, visible_ = false;
  Clock::time_point start_, last_;
};

}  // namespace kvq
