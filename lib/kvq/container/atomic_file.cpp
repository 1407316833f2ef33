#include <kvq/container/atomic_file.h>

#include <kvq/core/error.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <utility>

namespace kvq {
namespace {

/// Unique among processes and threads; independent of the target's name, which may already be as long as a name can be.
std::string temporary_name() {
  static std::atomic<unsigned> counter{0};
  return fmt::format(".kvq-{}-{}.tmp", ::getpid(), counter++);
}

int sync_descriptor(int descriptor) {
  int result;
  do result = ::fsync(descriptor);
  while (result != 0 && errno == EINTR);
  return result;
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)), folder_(path_.parent_path()) {
  if (folder_.empty()) folder_ = ".";
  // A rename would replace a device or a pipe by a plain file: refuse /dev/null rather than destroy it.
  struct stat existing;
  if (::stat(path_.c_str(), &existing) == 0 && !S_ISREG(existing.st_mode))
    throw Error{ErrorKind::io, fmt::format("{}: cannot write: not a regular file", path_.string())};

  constexpr int kAttempts = 100;  // a name is taken only if a killed process left its file behind
  for (int attempt = 0; attempt < kAttempts && descriptor_ < 0; ++attempt) {
    temporary_ = folder_ / temporary_name();
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ < 0 && errno != EEXIST && errno != EINTR) break;
  }
  if (descriptor_ >= 0) return;
  const int error = errno;
  temporary_.clear();
  fail("create a temporary file in its folder", error);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::fail(const char* action, int error) const {
  throw Error{ErrorKind::io,
              fmt::format("{}: cannot {}: {}", path_.string(), action, std::generic_category().message(error))};
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  constexpr std::size_t kLargestWrite = std::size_t{1} << 30;  // Linux writes at most 2 GiB - 4 KiB in one call
  while (!bytes.empty()) {
    const auto written = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kLargestWrite));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail("write", written < 0 ? errno : ENOSPC);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void AtomicFile::flush_and_close() {
  if (sync_descriptor(descriptor_) != 0) fail("flush to disk", errno);
  // Network file systems report a full disk at closing. After EINTR the descriptor is closed all the same (Linux).
  if (::close(std::exchange(descriptor_, -1)) != 0 && errno != EINTR) fail("close", errno);
}

void AtomicFile::sync_folder() const {
  const int descriptor = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;  // a folder may be writable and not readable; the file itself is on disk
  const int result = sync_descriptor(descriptor);
  const int error = errno;
  ::close(descriptor);
  if (result != 0 && error != EINVAL && error != ENOTSUP) fail("flush its folder to disk", error);
}

void AtomicFile::commit() {
  flush_and_close();
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename the temporary file", errno);
  temporary_.clear();
  sync_folder();
}

}  // namespace kvq
