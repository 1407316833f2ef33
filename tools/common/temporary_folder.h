#pragma once

#include <filesystem>

namespace kvq {

/// Where a ScratchFolder of this tool goes: a prefix inside the system's folder for temporary files (TMPDIR).
/// @param name  what the folder's name begins with
/// @throws Error{io} if no file can be made there
std::filesystem::path temporary_prefix(const char* name);

}  // namespace kvq
