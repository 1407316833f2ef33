#include <kvq/container/output_claim.h>
#include <kvq/container/output_target.h>
#include <kvq/container/temporaries.h>
#include <kvq/core/error.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <ctime>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

namespace kvq {

namespace fs = std::filesystem;

namespace {

/// The process that has a claim, as its lock file says: "<pid> <seconds since 1970> <tool>\n".
struct Holder {
  std::int64_t pid = 0, since = 0;
};

std::optional<Holder> read_holder(int descriptor) {
  std::array<char, 64> text{};
  const auto size = ::pread(descriptor, text.data(), text.size(), 0);
  if (size <= 0) return std::nullopt;  // the holder has not written it yet
  Holder holder;
  const char* end = text.data() + size;
  const auto pid = std::from_chars(text.data(), end, holder.pid);
  if (pid.ec != std::errc{} || pid.ptr == end || *pid.ptr != ' ') return std::nullopt;
  const auto since = std::from_chars(pid.ptr + 1, end, holder.since);
  const bool sound = since.ec == std::errc{} && holder.pid > 0 && holder.since > 0;
  return sound ? std::optional(holder) : std::nullopt;
}

void write_holder(int descriptor, const std::string& tool) {
  const std::string text = fmt::format("{} {} {}\n", ::getpid(), std::time(nullptr), tool);
  if (::ftruncate(descriptor, 0) != 0) return;  // a lock without this line is a lock, too
  [[maybe_unused]] const auto written = ::pwrite(descriptor, text.data(), text.size(), 0);
}

std::string time_text(std::int64_t seconds) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm parts{};
  std::array<char, 32> text{};
  if (::gmtime_r(&time, &parts) == nullptr) return "an unknown time";
  return {text.data(), std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts)};
}

[[noreturn]] void refuse_second(const fs::path& path, const std::optional<Holder>& holder) {
  const std::string who =
      holder ? fmt::format(" (process {}, since {})", holder->pid, time_text(holder->since)) : std::string();
  throw Error{ErrorKind::io, fmt::format("{}: another run is writing it{}", path.string(), who),
              "wait for the end of the other run, or choose another name"};
}

[[noreturn]] void refuse_lock(const fs::path& path, const fs::path& lock, const std::string& why) {
  throw Error{ErrorKind::io, fmt::format("{}: cannot lock it by {}: {}", path.string(), lock.string(), why)};
}

/// Opens a lock file, and makes it if it is missing. A file of another user is opened for reading, which is enough to
/// lock it.
int open_lock(const fs::path& lock) {
  constexpr int kFlags = O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK;
  const int descriptor = ::open(lock.c_str(), O_RDWR | kFlags, 0666);
  return descriptor < 0 && errno == EACCES ? ::open(lock.c_str(), O_RDONLY | kFlags, 0666) : descriptor;
}

/// Whether `lock` names the file of the descriptor: an earlier holder may have removed the file meanwhile.
bool is_current(int descriptor, const fs::path& lock) {
  struct stat opened, named;
  return ::fstat(descriptor, &opened) == 0 && ::lstat(lock.c_str(), &named) == 0 && opened.st_dev == named.st_dev &&
         opened.st_ino == named.st_ino;
}

bool is_plain_file(int descriptor) {
  struct stat opened;
  return ::fstat(descriptor, &opened) == 0 && S_ISREG(opened.st_mode) && opened.st_nlink <= 1;
}

/// Opens and locks a lock file.
/// @return  the descriptor; -1 if the file was removed meanwhile, so that the next attempt makes it anew
int try_lock(const fs::path& named, const fs::path& lock) {
  const int descriptor = open_lock(lock);
  if (descriptor < 0) refuse_lock(named, lock, std::generic_category().message(errno));
  const bool taken = ::flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  // A file system without locks fails in another way and gives the claim to everybody.
  const bool plain = is_plain_file(descriptor);
  if (!taken && plain && is_current(descriptor, lock)) return descriptor;
  const std::optional<Holder> holder = taken ? read_holder(descriptor) : std::nullopt;
  ::close(descriptor);
  if (taken) refuse_second(named, holder);
  if (!plain) refuse_lock(named, lock, "not a plain file");
  return -1;
}

/// Independent of the length of the name, which may be as long as a name can be.
fs::path lock_of(const fs::path& path) {
  const std::string name = path.filename().string();
  return folder_of(path) / fmt::format(".kvq-{:016x}.lock", XXH3_64bits(name.data(), name.size()));
}

}  // namespace

OutputClaim OutputClaim::of_file(const fs::path& path, const std::string& tool) {
  const fs::path target = output_target(path);
  return {path, target, lock_of(target), tool};
}

OutputClaim OutputClaim::of_folder(const fs::path& folder, const std::string& tool) {
  return {folder, folder, folder / ".kvq-folder.lock", tool};
}

OutputClaim::OutputClaim(const fs::path& named, fs::path path, const fs::path& lock, const std::string& tool)
    : path_(std::move(path)) {
  constexpr int kAttempts = 1000;  // each one fails only if a holder has just removed the lock file
  for (int attempt = 0; attempt < kAttempts && descriptor_ < 0; ++attempt)
    lock_ = make_temporary([&] {
      descriptor_ = try_lock(named, lock);
      return descriptor_ < 0 ? fs::path() : lock;
    });
  if (descriptor_ < 0) refuse_second(named, std::nullopt);
  write_holder(descriptor_, tool);
}

OutputClaim::OutputClaim(OutputClaim&& other) noexcept
    : path_(std::move(other.path_)), lock_(std::move(other.lock_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

OutputClaim::~OutputClaim() {
  if (descriptor_ < 0) return;
  ::unlink(lock_.c_str());  // before the lock is released, so that nobody else has it
  forget_temporary(lock_);
  ::close(descriptor_);
}

}  // namespace kvq
