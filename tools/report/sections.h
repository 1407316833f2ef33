#pragma once

#include "report/evaluation.h"

#include <kvq/artifact/artifact.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kvq {

/// The sections of the report, each whole HTML. A section whose data is absent says in one line what would make it
/// appear.

/// @param context  of the effective bits
std::string headline_section(const Artifact& artifact, const std::vector<EvaluatedScheme>& schemes,
                             std::int64_t context);
/// Widths of mixed rows, layer by layer (Block-GTQ, Figure 3); a table for the others.
std::string allocation_section(const Artifact& artifact);
/// How far each head was from balanced; nothing without transforms.
std::string transform_section(const Artifact& artifact);
/// Errors layer by layer (OSCAR, Figure 2), and a table of all schemes; without evaluations what calibration saw.
std::string error_section(const Artifact& artifact, const std::vector<Evaluation>& evaluations,
                          const std::vector<EvaluatedScheme>& schemes);
/// KL by the context that queries have (OSCAR, Figure 3).
std::string context_section(const std::vector<EvaluatedScheme>& schemes);
/// Error against bits, all schemes of all documents.
std::string pareto_section(const std::vector<EvaluatedScheme>& schemes);
std::string spectrum_section(const Artifact& artifact);
/// Bytes of a token and bits of an element.
std::string bytes_section(const Artifact& artifact, std::int64_t context);
std::string provenance_section(const Artifact& artifact, const std::vector<Evaluation>& evaluations);

}  // namespace kvq
