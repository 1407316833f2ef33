#pragma once

#include <kvq/container/json.h>
#include <kvq/eval/comparison.h>
#include <kvq/eval/evaluate.h>

#include <string>
#include <vector>

namespace kvq {

/// Four digits after the point, none for numbers from 100 on, two significant digits below 0.001; "-" for NaN.
std::string number_text(double x);

/// Tables of means over layers: errors, the distribution of KL, and each candidate against the first.
std::string summary_tables(const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results,
                           const std::vector<Comparison>& comparisons);
/// Table of one metric for each layer, then of bits per element: code bits of the keys, and effective bits of all that
/// is stored. Each block of columns begins with the first candidate.
std::string layer_table(Metric metric, const std::vector<Candidate>& candidates,
                        const std::vector<CandidateResult>& results);
/// Table of one metric by the number of keys before a query.
std::string context_table(Metric metric, const std::vector<Candidate>& candidates,
                          const std::vector<CandidateResult>& results);

/// OSCAR Table 10 for the held-out keys: means over KV heads; max|k| is the maximum over heads.
std::string rotation_columns_table(const std::vector<Candidate>& candidates,
                                   const std::vector<CandidateResult>& results);

/// The document of formats/eval.schema.json without `tool` and `dump`.
Json evaluation_json(const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results,
                     const std::vector<Comparison>& comparisons);

}  // namespace kvq
