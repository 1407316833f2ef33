#pragma once

#include <chrono>
#include <mutex>
#include <string>

namespace kvq {

/// Progress on stderr: on a terminal one line that is rewritten, elsewhere a line every ten seconds. `total_work` is in
/// any unit that is proportional to time (here: floating-point operations).
class Progress {
 public:
  Progress(double total_work, bool quiet);
  ~Progress();
  /// Updates the progress line; callable from any thread.
  /// @param done  all work so far
  /// @param what  the current work ("layer 3/36, 12400 tokens/s")
  void update(double done, const std::string& what);
  /// Removes the progress line from a terminal.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  std::mutex mutex_;
  double total_;
  bool quiet_, terminal_, visible_ = false;
  Clock::time_point start_, last_;
};

}  // namespace kvq
