#pragma once

#include "inspect/compare.h"

#include <cstdint>
#include <string>
#include <vector>

namespace kvq {

/// Writes one self-contained HTML file without scripts. The same inputs give the same bytes.
/// @param evaluations  paths of documents of kvq-eval --json
/// @param context      tokens for the effective bits
/// @throws Error{usage} if `path` is one of the inputs, and the errors of read_evaluations() and AtomicFile. If it
///         throws, no file is written
void write_html_report(const NamedArtifact& artifact, const std::vector<std::string>& evaluations, std::int64_t context,
                       const std::string& path);

}  // namespace kvq
