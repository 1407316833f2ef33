#include <kvq/container/atomic_file.h>
#include <kvq/container/output_target.h>
#include <kvq/container/temporaries.h>
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

AtomicFile::AtomicFile(std::filesystem::path path)
    : path_(std::move(path)), target_(output_target(path_)), folder_(folder_of(target_)) {
  create_temporary();
  take_over_mode();
}

void AtomicFile::create_temporary() {
  constexpr int kAttempts = 100;  // a name is taken only if a killed process left its file behind
  constexpr mode_t kOwnerOnly = 0600, kByUmask = 0666;
  const mode_t mode = ::access(target_.c_str(), F_OK) == 0 ? kOwnerOnly : kByUmask;  // until take_over_mode()
  temporary_ = make_temporary([&] {
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      const std::filesystem::path name = folder_ / temporary_name();
      descriptor_ = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
      if (descriptor_ >= 0) return name;
      if (errno != EEXIST && errno != EINTR) break;
    }
    fail("create a temporary file in its folder", errno);
  });
}

void AtomicFile::take_over_mode() const {
  constexpr mode_t kPermissions = 0777;
  struct stat old;
  if (::stat(target_.c_str(), &old) != 0) return;
  // Only root may give files away. A file whose owner changes keeps no more than its permissions.
  [[maybe_unused]] const int ignored = ::fchown(descriptor_, old.st_uid, old.st_gid);
  ::fchmod(descriptor_, old.st_mode & kPermissions);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (temporary_.empty()) return;
  ::unlink(temporary_.c_str());
  forget_temporary(temporary_);
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
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("rename the temporary file", errno);
  forget_temporary(temporary_);
  temporary_.clear();
  sync_folder();
}

}  // namespace kvq
