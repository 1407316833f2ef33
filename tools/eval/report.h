#pragma once

#include "eval/results.h"

#include <kvq/container/json.h>

#include <string>
#include <vector>

namespace kvq {

/// Four digits behind the point, or two in all where that would show nothing; "-" for NaN.
std::string number_text(double x);

/// Means over layers: errors, the distribution of KL, and every candidate against the first.
std::string summary_tables(const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results,
                           const std::vector<Comparison>& comparisons);
/// One metric layer by layer, then bits of an element: of the keys' codes alone, and of everything that is stored. The
/// first candidate stands in every block of columns.
std::string layer_table(Metric metric, const std::vector<Candidate>& candidates,
                        const std::vector<CandidateResult>& results);
/// One metric by the context that queries have before them.
std::string context_table(Metric metric, const std::vector<Candidate>& candidates,
                          const std::vector<CandidateResult>& results);

/// OSCAR Table 10 on the held-out keys: means over KV heads, max|k| the largest.
std::string rotation_columns_table(const std::vector<Candidate>& candidates,
                                   const std::vector<CandidateResult>& results);

/// formats/eval.schema.json without `tool` and `dump`.
Json evaluation_json(const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results,
                     const std::vector<Comparison>& comparisons);

}  // namespace kvq
