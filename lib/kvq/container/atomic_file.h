#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

namespace kvq {

/// A file that appears whole or not at all. Bytes go to a temporary file in the folder of output_target(path); commit()
/// flushes it to disk and renames it. Without commit() the destructor removes the temporary file and the file is
/// unchanged. A file that is replaced hands its mode, and where the system allows it its owner, to the new one.
class AtomicFile {
 public:
  /// @throws Error{io} naming the path and the system's reason, as all members do; the errors of output_target()
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void commit();

 private:
  [[noreturn]] void fail(const char* action, int error) const;
  void create_temporary();
  void take_over_mode() const;
  void flush_and_close();
  void sync_folder() const;

  std::filesystem::path path_;    ///< as it was named
  std::filesystem::path target_;  ///< what is replaced
  std::filesystem::path folder_;
  std::filesystem::path temporary_;  ///< empty when there is nothing to remove
  int descriptor_ = -1;
};

}  // namespace kvq
