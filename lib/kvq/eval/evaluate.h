#pragma once

#include <kvq/dump/dump_file.h>
#include <kvq/eval/calibration_dump.h>
#include <kvq/eval/candidate.h>
#include <kvq/eval/metrics.h>
#include <kvq/eval/rotation_columns.h>
#include <kvq/eval/summary.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace kvq {

/// Distributions of the metrics that have one (MetricRow::per_query); zeros for all others.
using Distributions = PerMetric<Distribution>;

/// The queries of a layer that have a context of `first` tokens or more, up to the next bucket.
struct BucketResult {
  std::int64_t first = 0, queries = 0;
  Values values;  ///< metrics over queries only
};

/// One layer of one candidate.
struct LayerResult {
  int layer = 0;
  Values values;
  Distributions distributions;
  std::vector<Values> heads;  ///< [Hkv]
  std::vector<BucketResult> buckets;
  double k_elements = 0.0, v_elements = 0.0;  ///< of a token
  double k_bits = 16.0, v_bits = 16.0;        ///< effective bits of an element; v_bits is NaN without values
  double k_code_bits = 16.0, v_code_bits = 16.0;
  std::vector<RotationColumns> rotations;  ///< [Hkv]; empty if not requested, or if keys are not stored by a plan
};

struct CandidateResult {
  std::vector<LayerResult> layers;
  Values mean;                                     ///< over the layers that have the metric
  Distributions distributions;                     ///< mean over layers of each field, but the maximum of `max`
  double bits = 0.0;                               ///< mean over all elements of both sides
  double k_code_bits = 0.0;                        ///< mean over elements of keys
  std::optional<DumpRelation> calibrated_on = {};  ///< missing for a scheme
};

struct EvalRequest {
  std::vector<int> layers;
  bool with_windows = true;      ///< false: every token counts as quantized
  bool with_attention = true;    ///< false: only metrics of MetricSource::rope_logits
  bool with_context = false;     ///< also MetricRow::on_request
  bool rotations = false;        ///< also RotationColumns
  std::int64_t pairs = 2048;     ///< see RopeLogitRequest
  std::int64_t context = 32768;  ///< of effective bits, in tokens
  std::uint64_t seed = 0;        ///< of pairs and of random rotations of schemes
};

/// Measures all candidates on the dump, a few candidates at a time, so that memory does not grow with their number. A
/// candidate with a path and no artifact is loaded only for that time. Artifacts must fit the dump, see check_model().
/// @param say  called with the fraction that is done and the current work
/// @throws Error{numerical} for rows that are not finite when they are coded; Error{bad_input} if a loaded artifact
/// does not fit the dump
std::vector<CandidateResult> evaluate(const Dump& dump, std::vector<Candidate>& candidates, const EvalRequest& request,
                                      const std::function<void(double, const std::string&)>& say);

}  // namespace kvq
