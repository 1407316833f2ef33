#pragma once

#include <kvq/artifact/artifact.h>
#include <kvq/methods/method.h>
#include <kvq/methods/rotated_plan.h>

#include <filesystem>
#include <string>
#include <vector>

namespace kvq {

/// The table that kvq-calibrate prints last: one line for each layer and side.
std::string closing_table(const Artifact& artifact, std::int64_t context);

/// OSCAR Table 10 and Figure 7 per layer (means over heads; the largest entry is the maximum), with the invariants of
/// the paper.
std::string rotation_table(const std::vector<LayerRotationReport>& reports, Scope scope);
Json rotation_json(const std::vector<LayerRotationReport>& reports);

/// The document of --json.
Json calibrate_json(const Artifact& artifact, const std::filesystem::path& output, std::int64_t context);

std::string budget_text(const Json& budget);

}  // namespace kvq
