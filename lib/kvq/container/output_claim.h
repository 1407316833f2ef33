#pragma once

#include <filesystem>
#include <string>

namespace kvq {

/// The right to write an output. Only one process at a time has it: a lock on a small file `.kvq-<hash>.lock` beside
/// the output says so. The system releases the lock when the process ends, however it ends.
class OutputClaim {
 public:
  /// Claims the file that output_target(path) names.
  /// @param tool  program name, for the message that other processes print
  /// @throws Error{io} if another process has the claim, with its number and the time of its claim; the errors of
  ///         output_target()
  static OutputClaim of_file(const std::filesystem::path& path, const std::string& tool);
  /// Claims all files inside an existing folder. @throws Error{io} as of_file()
  static OutputClaim of_folder(const std::filesystem::path& folder, const std::string& tool);

  ~OutputClaim();
  OutputClaim(OutputClaim&& other) noexcept;
  OutputClaim& operator=(OutputClaim&&) = delete;

  /// The file to write, with symbolic links followed; or the folder.
  const std::filesystem::path& path() const { return path_; }

 private:
  OutputClaim(const std::filesystem::path& named, std::filesystem::path path, const std::filesystem::path& lock,
              const std::string& tool);

  std::filesystem::path path_, lock_;
  int descriptor_ = -1;
};

}  // namespace kvq
