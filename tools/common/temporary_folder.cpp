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

// A signal handler must not remove files. The handler therefore writes to a pipe, and a cleaner thread reads the pipe,
// removes all folders and ends the process. Other threads run until then. If another thread fails because its folder is
// gone, the destructor of TemporaryFolder waits for the end of the process, so the failure is never reported.

namespace kvq {

namespace {

namespace fs = std::filesystem;

struct Folders {
  std::mutex mutex;
  std::set<fs::path> paths;
  std::atomic<bool> interrupted = false;
  int wake[2] = {-1, -1};  ///< pipe: the cleaner thread reads [0], the handler writes [1]
};

/// Never destroyed, because the cleaner thread may outlive static objects.
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

/// Removes a folder until it stays removed, because another thread may still write into it; at most 100 attempts.
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
  if (pipe(folders().wake) != 0) return;  // without the pipe, signals end the process as by default
  wake_end = folders().wake[1];
  std::thread(clean_when_woken, tool).detach();
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const auto before = std::signal(signal, wake_cleaner);
    if (before == SIG_IGN)
      std::signal(signal, SIG_IGN);  // keeps a signal ignored that was ignored before, as under nohup
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
