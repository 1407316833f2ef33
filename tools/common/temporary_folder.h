#pragma once

#include <filesystem>

namespace kvq {

/// A folder below the one for temporary files (TMPDIR). It goes away with the object, and when the process is
/// interrupted: from the first object on, SIGINT, SIGTERM and SIGHUP remove all of them, say so and end the process
/// with code 130.
class TemporaryFolder {
 public:
  /// @param name  what its name begins with
  /// @param tool  who says that it was interrupted; a string that stays
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
