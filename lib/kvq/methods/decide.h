#pragma once

#include <kvq/artifact/artifact.h>
#include <kvq/methods/method.h>
#include <kvq/stats/stats_file.h>

#include <string>
#include <vector>

namespace kvq {

/// Where the statistics of a decision come from, as the artifact tells it.
struct DecisionOrigin {
  StatsHeader header;                       ///< its model has the source's layers, in the source's order
  std::vector<std::string> content_hashes;  ///< of each layer's dump data
  std::int64_t tokens = 0, sequences = 0;   ///< that the statistics saw
};

/// Calibration in one call: plans of all layers, with their provenance and golden rows.
/// @param method         of the registry (find_method()) or the caller's own; the artifact has its name
/// @param golden_tokens  tokens a layer whose rows and bytes the artifact carries, at most; 0 = none
/// @throws Error{usage, numerical} as the method does
Artifact decide(const Method& method, const StatsSource& source, const DecisionOrigin& origin, const Options& options,
                std::int64_t golden_tokens, const MethodContext& context = {});

/// The manifest's form of a report (formats/artifact.md).
Json budget_to_json(const BudgetReport& report);

}  // namespace kvq
