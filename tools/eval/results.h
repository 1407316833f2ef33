#pragma once

#include "eval/candidates.h"

#include <kvq/dump/dump_file.h>
#include <kvq/eval/attention_error.h>
#include <kvq/eval/rope_logit_error.h>
#include <kvq/eval/rotation_columns.h>
#include <kvq/eval/summary.h>

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvq {

/// A metric of a layer or of a head. attention_kl is the mean of the KL distribution, so that it compares as the others
/// do.
enum class Metric {
  k_rel_mse,
  v_rel_mse,
  logit_rel_mse,
  rope_logit_mae,
  sv_rel_mse,
  attention_kl,
  top10_overlap,
  output_rel_mse,
  o_proj_rel_mse,
  output_nats
};
constexpr std::size_t kNumMetrics = 10;

struct MetricRow {
  Metric metric;
  std::string_view name, header, summary;
  bool more_is_better = false;
};
std::span<const MetricRow> metric_rows();
const MetricRow& row_of(Metric metric);
/// @throws Error{usage} listing the names
Metric find_metric(const std::string& name);

/// Values by Metric. NaN: the metric does not apply (no values, no o_proj, ...) or was not requested.
using Values = std::array<double, kNumMetrics>;
inline double value_of(const Values& values, Metric metric) { return values[static_cast<std::size_t>(metric)]; }

struct BucketResult {
  std::int64_t first = 0, queries = 0;
  Values values;  ///< metrics over queries only
};

/// One layer of one candidate.
struct LayerResult {
  int layer = 0;
  Values values;
  Distribution kl;
  std::vector<Values> heads;
  std::vector<BucketResult> buckets;
  double k_elements = 0.0, v_elements = 0.0;  ///< of a token
  double k_bits = 16.0, v_bits = 16.0;        ///< effective bits of an element; v_bits is NaN without values
  double k_code_bits = 16.0, v_code_bits = 16.0;
  std::vector<RotationColumns> rotations;  ///< [Hkv]; empty if not requested, or if keys are not stored by a plan
};

struct CandidateResult {
  std::vector<LayerResult> layers;
  Values mean;      ///< over layers
  Distribution kl;  ///< mean over layers of each field, but the maximum of `max`
  double bits = 0.0,
         k_code_bits = 0.0;  ///< bits: mean over all elements of both sides; k_code_bits: over elements of keys
};

/// One metric of a candidate against the first candidate.
struct Comparison {
  std::size_t candidate = 0;
  Metric metric = Metric::output_rel_mse;
  PairedChange change;                   ///< over (layer, KV head), or over layers if the metric has no values per head
  int wins = 0, losses = 0, layers = 0;  ///< layers with a better value, layers with a worse value, all layers compared
};

struct EvalRequest {
  std::vector<int> layers;
  bool with_windows = true, only_rope = false, rotations = false;
  std::int64_t pairs = 2048, context = 32768;
  std::uint64_t seed = 0;
};

/// Evaluates a few candidates at a time, so that memory does not grow with their number. A candidate with a path and no
/// artifact is loaded only for that time. Artifacts must fit the dump, see check_model().
/// @param say  called with the fraction that is done and the current work
std::vector<CandidateResult> evaluate(const Dump& dump, std::vector<Candidate>& candidates, const EvalRequest& request,
                                      const std::function<void(double, const std::string&)>& say);

/// Compares all candidates with the first, for all metrics that both have.
std::vector<Comparison> compare_all(const std::vector<CandidateResult>& results, std::uint64_t seed);

}  // namespace kvq
