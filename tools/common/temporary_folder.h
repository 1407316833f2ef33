#pragma once

#include <filesystem>

namespace kvq {

/// A folder inside the system's folder for temporary files (TMPDIR). The destructor removes the folder. Once the first
/// TemporaryFolder exists, SIGINT, SIGTERM and SIGHUP remove all of them, print a line and end the process with code
/// 130.
class TemporaryFolder {
 public:
  /// @param name  prefix of the folder's name
  /// @param tool  program name for the message of an interruption; must outlive the process's threads, e.g. a literal
  /// @throws Error{io}
  TemporaryFolder(const char* name, const char* tool);
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace kvq
