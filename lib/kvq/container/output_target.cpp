#include <kvq/container/output_target.h>
#include <kvq/core/error.h>

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <system_error>

namespace kvq {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void refuse(const fs::path& path, const std::string& why, const std::string& hint = {}) {
  throw Error{ErrorKind::io, fmt::format("{}: cannot write: {}", path.string(), why), hint};
}

/// The text as one word of a shell's command line.
std::string shell_word(const std::string& text) {
  const auto is_plain = [](unsigned char c) {
    return std::isalnum(c) != 0 || std::string_view("/._-+=:,@%").find(static_cast<char>(c)) != std::string_view::npos;
  };
  if (std::all_of(text.begin(), text.end(), is_plain)) return text;
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

void expect_folder(const fs::path& path, const fs::path& folder) {
  std::error_code failed;
  const fs::file_status status = fs::status(folder, failed);
  if (status.type() == fs::file_type::not_found)
    refuse(path, fmt::format("the folder {} is missing", folder.string()),
           fmt::format("mkdir -p {}", shell_word(folder.string())));
  if (status.type() != fs::file_type::directory) {
    const std::string why = failed ? failed.message() : "not a folder";
    refuse(path, fmt::format("{}: {}", folder.string(), why));
  }
}

/// A link inside /proc is a descriptor: a file that replaces it would replace what the descriptor was opened by, such
/// as the system's /dev/stdout.
void expect_no_descriptor(const fs::path& path, const fs::path& folder) {
  struct statfs system;
  if (::statfs(folder.c_str(), &system) == 0 && system.f_type == PROC_SUPER_MAGIC)
    refuse(path, "expected the name of a file, found a descriptor of a process",
           "name a file, or redirect standard output");
}

fs::path follow_links(const fs::path& path) {
  constexpr int kMostLinks = 40;  // as Linux follows
  fs::path target = path;
  for (int links = 0; links <= kMostLinks; ++links) {
    expect_folder(path, folder_of(target));
    expect_no_descriptor(path, folder_of(target));
    std::error_code failed;
    if (!fs::is_symlink(target, failed)) return target;
    const fs::path next = fs::read_symlink(target, failed);
    if (failed) refuse(path, failed.message());
    target = next.is_absolute() ? next : target.parent_path() / next;
  }
  refuse(path, std::generic_category().message(ELOOP));
}

void expect_permission(const fs::path& path, const fs::path& what, int mode) {
  if (::faccessat(AT_FDCWD, what.c_str(), mode, AT_EACCESS) == 0) return;
  const std::string why = std::generic_category().message(errno);
  refuse(path, what == path ? why : fmt::format("{}: {}", what.string(), why));
}

void refuse_standard_output(const fs::path& path) {
  if (path == "-")
    throw Error{ErrorKind::usage, "-: expected the name of a file or folder, found the sign of standard output",
                "./- names a file in the current folder"};
}

}  // namespace

fs::path folder_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : "."; }

fs::path output_target(const fs::path& path) {
  refuse_standard_output(path);
  fs::path target = follow_links(path);
  struct stat existing;
  const bool exists = ::stat(target.c_str(), &existing) == 0;
  if (exists && !S_ISREG(existing.st_mode)) refuse(path, "not a regular file");
  if (!target.has_filename()) refuse(path, "expected the name of a file, found that of a folder");
  if (exists) expect_permission(path, target, W_OK);
  expect_permission(path, folder_of(target), W_OK | X_OK);
  return target;
}

void make_output_folder(const fs::path& path) {
  refuse_standard_output(path);
  const fs::path folder = path.has_filename() ? path : path.parent_path();
  std::error_code failed;
  if (!fs::exists(folder, failed)) {
    expect_folder(path, folder_of(folder));
    if (!fs::create_directory(folder, failed))
      refuse(path, fmt::format("cannot create the folder: {}", failed.message()));
  }
  expect_folder(path, folder);
  expect_permission(path, folder, W_OK | X_OK);
}

}  // namespace kvq
