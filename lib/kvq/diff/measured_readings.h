#pragma once

#include <kvq/artifact/artifact.h>
#include <kvq/diff/readings.h>
#include <kvq/eval/evaluate.h>

#include <functional>
#include <string>
#include <vector>

namespace kvq {

/// Readings from a dump: every metric of kvq-eval, as a mean over layers, of each layer and of each head. If one layer
/// of a mean is NaN, the mean is NaN.
/// @param exact    result of exact keys and values: a metric that is NaN there does not apply and has no reading
/// @param budgets  both artifacts have one budget over all layers
std::vector<Reading> diff_results(const CandidateResult& before, const CandidateResult& after,
                                  const CandidateResult& exact, bool budgets);

/// True if the artifact has codes, but its exact windows hold all tokens of the dump, so that no error comes from
/// codes.
bool nothing_coded(const CandidateResult& result);

/// An artifact with its file.
struct DiffFile {
  std::string path;
  Artifact artifact;
};

struct MeasuredDiff {
  std::vector<Reading> readings;  ///< without those that need codes if nothing_coded
  bool nothing_coded = false;     ///< of either artifact
};

/// Stores rows of the dump by both artifacts and reads all metrics in the layers that both artifacts and the dump have.
/// @param request  its layers are not read
/// @param say      called with the fraction that is done and the current work
/// @throws Error{bad_input} if no such layer exists, or if an artifact is of another model than the dump
MeasuredDiff measure_diff(const Dump& dump, DiffFile before, DiffFile after, EvalRequest request,
                          const std::function<void(double, const std::string&)>& say);

}  // namespace kvq
