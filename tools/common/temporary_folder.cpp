#include "common/temporary_folder.h"

#include <kvq/core/error.h>

#include <fmt/format.h>

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>

// Removing files is nothing that a signal handler may do. The handler wakes a thread, which removes them and ends the
// process; the others go on until then, and whoever stumbles over a folder that is gone waits for the end instead of
// reporting it.

namespace kvq {

namespace {

namespace fs = std::filesystem;

struct Folders {
  std::mutex mutex;
  std::set<fs::path> paths;
  std::atomic<bool> interrupted = false;
  int wake[2] = {-1, -1};  ///< pipe: read by the thread, written by the handler
};

/// Never destroyed: the thread may outlive everything else.
Folders& folders() {
  static Folders& all = *new Folders;
  return all;
}

int wake_end = -1;

extern "C" void wake_cleaner(int) {
  const int before = errno;
  [[maybe_unused]] const auto written = write(wake_end, "", 1);
  errno = before;
}

/// Another thread may still be writing into it: gone means gone for a while.
void remove_for_good(const fs::path& path) {
  constexpr int kAttempts = 100;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    std::error_code ignored;
    fs::remove_all(path, ignored);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (!fs::exists(path, ignored)) return;
  }
}

void clean_when_woken(const char* tool) {
  char byte;
  while (read(folders().wake[0], &byte, 1) != 1)
    if (errno != EINTR) return;
  folders().interrupted = true;
  const std::lock_guard lock(folders().mutex);
  for (const fs::path& path : folders().paths) remove_for_good(path);
  fmt::print(stderr, "\n{}: interrupted\n", tool);
  _exit(130);
}

void watch_signals(const char* tool) {
  if (pipe(folders().wake) != 0) return;  // then signals end the process as they always do
  wake_end = folders().wake[1];
  std::thread(clean_when_woken, tool).detach();
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const auto before = std::signal(signal, wake_cleaner);
    if (before == SIG_IGN) std::signal(signal, SIG_IGN);  // as under nohup
  }
}

}  // namespace

TemporaryFolder::TemporaryFolder(const char* name, const char* tool) {
  static std::once_flag watching;
  std::call_once(watching, watch_signals, tool);
  std::error_code failed;
  const fs::path place = fs::temp_directory_path(failed);
  std::string pattern = (place / fmt::format("{}-XXXXXX", name)).string();
  const char* named = std::getenv("TMPDIR");
  const std::lock_guard lock(folders().mutex);
  if (failed || mkdtemp(pattern.data()) == nullptr)
    throw Error{ErrorKind::io, fmt::format("{}: cannot create a temporary folder", named != nullptr ? named : "/tmp"),
                "TMPDIR names the folder for temporary files"};
  path_ = pattern;
  folders().paths.insert(path_);
}

TemporaryFolder::~TemporaryFolder() {
  while (folders().interrupted) pause();
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  const std::lock_guard lock(folders().mutex);
  folders().paths.erase(path_);
}

}  // namespace kvq
