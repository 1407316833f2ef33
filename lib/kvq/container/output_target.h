#pragma once

#include <filesystem>

namespace kvq {

/// The file that is written for an output named `path`. Symbolic links are followed, so that a link stays a link and
/// the file behind it is replaced. The folder must be there, because no tool makes folders for its outputs.
/// @return  `path` itself if it is no link
/// @throws Error{usage} for "-", which names standard output; Error{io} if the folder is missing or cannot be written,
///         if the file is there and is not a regular file or cannot be written, or if `path` stands for a descriptor
///         of a process (/dev/stdout)
std::filesystem::path output_target(const std::filesystem::path& path);

/// Makes the folder of an output that is a folder, if it is missing; the folder around it must be there.
/// @throws Error{usage} for "-"; Error{io} if `path` is a file, or is missing and cannot be made, or cannot be written
void make_output_folder(const std::filesystem::path& path);

/// The folder of a file; "." if the path names none.
std::filesystem::path folder_of(const std::filesystem::path& path);

}  // namespace kvq
