#pragma once

#include <kvq/container/output_claim.h>

#include <optional>
#include <string>

namespace kvq {

/// Claims a file that a flag names for a text, before the work that makes the text. "-" is standard output and an empty
/// path is no output: nothing is claimed.
/// @param tool  program name
/// @throws the errors of OutputClaim::of_file()
std::optional<OutputClaim> claim_text_output(const std::string& path, const char* tool);

/// Writes a text to standard output if `path` is "-", else atomically to the file. @throws the errors of AtomicFile
void write_text_output(const std::string& path, const std::string& text);

}  // namespace kvq
