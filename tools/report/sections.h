#pragma once

#include "report/evaluation.h"

#include <kvq/artifact/artifact.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kvq {

/// The sections of the report as HTML. A section without data is one line that says how to get the data.

/// What a reader asks first: how much smaller, how wrong beside 4-bit and fp8 caches, and whether the runtime serves
/// it.
/// @param path  of the artifact
std::string verdict_section(const Artifact& artifact, const std::string& path,
                            const std::vector<EvaluatedScheme>& schemes, std::int64_t context);
/// @param context  tokens for the effective bits
std::string headline_section(const Artifact& artifact, const std::vector<EvaluatedScheme>& schemes,
                             std::int64_t context);
/// Charts of mixed widths by layer (Block-GTQ, Figure 3), and a table of the sides with one width.
std::string allocation_section(const Artifact& artifact);
/// Outlier gains of all heads; empty if the artifact has no transforms.
std::string transform_section(const Artifact& artifact);
/// Errors by layer (OSCAR, Figure 2) and a table of all schemes. Without evaluations, the errors that calibration
/// measured.
std::string error_section(const Artifact& artifact, const std::vector<Evaluation>& evaluations,
                          const std::vector<EvaluatedScheme>& schemes);
/// KL by the number of keys before a query (OSCAR, Figure 3).
std::string context_section(const std::vector<EvaluatedScheme>& schemes);
/// Scatter chart of error against bits, with the schemes of all documents.
std::string pareto_section(const std::vector<EvaluatedScheme>& schemes);
std::string spectrum_section(const Artifact& artifact);
/// Bytes per token and bits per element.
std::string bytes_section(const Artifact& artifact, std::int64_t context);
/// How the runtime serves the layers, or why not.
std::string serving_section(const Artifact& artifact);
std::string provenance_section(const Artifact& artifact, const std::vector<Evaluation>& evaluations);

}  // namespace kvq
