#pragma once

#include "inspect/compare.h"

#include <cstdint>
#include <string>
#include <vector>

namespace kvq {

/// Writes one HTML file that stands alone: no scripts, nothing from elsewhere. The same inputs give the same bytes.
/// @param evaluations  paths of documents of kvq-eval --json
/// @param context      of the effective bits
/// @throws Error{usage} if the file is one of the inputs, else as read_evaluations() and AtomicFile do; then no file is
/// written
void write_html_report(const NamedArtifact& artifact, const std::vector<std::string>& evaluations, std::int64_t context,
                       const std::string& path);

}  // namespace kvq
