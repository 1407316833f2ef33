#pragma once

#include "support/container_edit.h"

#include <filesystem>
#include <functional>
#include <span>

namespace kvq::test {

/// A fault of an artifact or a statistics file, and the error that a reader must report.
struct FileFault {
  const char* name;
  const char* kind;  ///< start of the error, such as "bad_input: "
  const char* word;  ///< in the error
  std::function<void(EditableFile&)> make;
};

/// Writes the file `good` with each fault and checks that `read` throws one line with its kind, the path and its word.
/// Without a fault, the file that is written must have the bytes of `good`.
void check_refused(std::span<const FileFault> faults, const std::filesystem::path& good,
                   const std::function<void(const std::filesystem::path&)>& read);

}  // namespace kvq::test
