#pragma once

#include "eval/sweep.h"

#include <kvq/eval/evaluate.h>

#include <string>
#include <vector>

/// The tables of kvq-eval as CSV (formats/eval.md, "CSV"): one header, one record a line, numbers with all digits.
namespace kvq {

/// A record for each candidate: bits, and means over layers of all metrics that any candidate has.
std::string summary_csv(const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results);

/// A record for each layer and candidate: bits and one metric.
std::string layer_csv(Metric metric, const std::vector<Candidate>& candidates,
                      const std::vector<CandidateResult>& results);

/// A record for each context bucket and candidate: the mean over layers of one metric.
std::string context_csv(Metric metric, const std::vector<Candidate>& candidates,
                        const std::vector<CandidateResult>& results);

/// A record for each layer, KV head and candidate: the columns of OSCAR Table 10. A candidate without them has none.
std::string rotations_csv(const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results);

/// summary_csv() of a sweep, with flags, fronts and distances of widths.
std::string sweep_csv(const Sweep& sweep, const std::vector<Candidate>& candidates,
                      const std::vector<CandidateResult>& results);

}  // namespace kvq
