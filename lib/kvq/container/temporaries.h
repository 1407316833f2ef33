#pragma once

#include <filesystem>
#include <functional>

/// Temporary files and folders of this process, so that an interrupted process leaves none.
namespace kvq {

/// Calls `make`, which creates a file or folder, and remembers the path that `make` returns. An interruption comes
/// before or after this step. Once remove_temporaries() has begun, make_temporary() waits for the end of the process.
/// @return  the path that `make` returned; an empty path is not remembered
std::filesystem::path make_temporary(const std::function<std::filesystem::path()>& make);

/// Forgets a path that was removed or renamed.
void forget_temporary(const std::filesystem::path& path) noexcept;

/// Removes all remembered files and folders, the last one first. Called by the thread that ends an interrupted process,
/// not by a signal handler.
void remove_temporaries();

/// If remove_temporaries() has begun, waits for the end of the process. An error after an interruption is a consequence
/// of the removed files, so no thread may report it.
void wait_if_interrupted() noexcept;

/// A new folder; the destructor and an interruption remove it with all that it holds.
class ScratchFolder {
 public:
  /// @param prefix  path that the folder's path begins with; six random characters follow
  /// @throws Error{io}
  explicit ScratchFolder(const std::filesystem::path& prefix);
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  /// Renames the folder to `target`, where it stays.
  /// @throws Error{io}, also if `target` is a file or a folder that is not empty
  void keep_as(const std::filesystem::path& target);

 private:
  std::filesystem::path path_;  ///< empty once it is kept
};

}  // namespace kvq
