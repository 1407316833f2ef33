#include <kvq/container/temporaries.h>
#include <kvq/core/error.h>

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace kvq {

namespace fs = std::filesystem;

namespace {

struct Temporaries {
  std::mutex mutex;
  std::vector<fs::path> paths;  ///< in the order in which they were made
  std::atomic<bool> interrupted = false;
};

/// Never destroyed, because the thread that removes temporaries may outlive static objects.
Temporaries& temporaries() {
  static Temporaries& all = *new Temporaries;
  return all;
}

/// Removes a file or folder until it stays removed, because another thread may still write into the folder; at most 100
/// attempts.
void remove_for_good(const fs::path& path) {
  constexpr int kAttempts = 100;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    std::error_code ignored;
    const bool is_folder = fs::is_directory(fs::symlink_status(path, ignored));
    fs::remove_all(path, ignored);
    if (!is_folder) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (!fs::exists(path, ignored)) return;
  }
}

}  // namespace

void wait_if_interrupted() noexcept {
  while (temporaries().interrupted) ::pause();
}

fs::path make_temporary(const std::function<fs::path()>& make) {
  std::unique_lock lock(temporaries().mutex);
  if (temporaries().interrupted) {
    lock.unlock();
    wait_if_interrupted();
  }
  fs::path path = make();
  if (!path.empty()) temporaries().paths.push_back(path);
  return path;
}

void forget_temporary(const fs::path& path) noexcept {
  const std::lock_guard lock(temporaries().mutex);
  std::erase(temporaries().paths, path);
}

void remove_temporaries() {
  temporaries().interrupted = true;
  const std::lock_guard lock(temporaries().mutex);
  std::for_each(temporaries().paths.rbegin(), temporaries().paths.rend(), remove_for_good);
}

ScratchFolder::ScratchFolder(const fs::path& prefix) {
  path_ = make_temporary([&]() -> fs::path {
    std::string name = prefix.string() + "XXXXXX";
    if (::mkdtemp(name.data()) != nullptr) return name;
    throw Error{ErrorKind::io,
                fmt::format("{}: cannot create a temporary folder: {}", name, std::generic_category().message(errno))};
  });
}

ScratchFolder::~ScratchFolder() {
  wait_if_interrupted();
  if (path_.empty()) return;
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  forget_temporary(path_);
}

void ScratchFolder::keep_as(const fs::path& target) {
  if (::rename(path_.c_str(), target.c_str()) != 0)
    throw Error{ErrorKind::io, fmt::format("{}: cannot create the folder: {}", target.string(),
                                           std::generic_category().message(errno))};
  forget_temporary(path_);
  path_.clear();
}

}  // namespace kvq
