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

/// The numbers of a layer or a head. attention_kl stands for the mean of the distribution, so that it can be compared
/// like the others.
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

/// NaN: the layer has no such number (no values, no o_proj, ...) or nobody asked.
using Values = std::array<double, kNumMetrics>;
inline double value_of(const Values& values, Metric metric) { return values[static_cast<std::size_t>(metric)]; }

struct BucketResult {
  std::int64_t first = 0, queries = 0;
  Values values;  ///< those that belong to queries
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
  std::vector<RotationColumns> rotations;  ///< [Hkv], or empty: nobody asked, or keys are stored by no plan
};

struct CandidateResult {
  std::vector<LayerResult> layers;
  Values mean;                           ///< over layers
  Distribution kl;                       ///< mean over layers of each, but the largest max
  double bits = 0.0, k_code_bits = 0.0;  ///< mean over all elements, of both sides, and of keys
};

/// A candidate against the first one, by one metric.
struct Comparison {
  std::size_t candidate = 0;
  Metric metric = Metric::output_rel_mse;
  PairedChange change;                   ///< over (layer, KV head), or over layers where heads have no such number
  int wins = 0, losses = 0, layers = 0;  ///< layers with a better, a worse value
};

struct EvalRequest {
  std::vector<int> layers;
  bool with_windows = true, only_rope = false, rotations = false;
  std::int64_t pairs = 2048, context = 32768;
  std::uint64_t seed = 0;
};

/// Candidates are taken a few at a time, so that memory does not grow with their number; those that have a path and no
/// artifact are loaded for that time. Artifacts have to fit the dump, see check_model().
/// @param say  called with the part that is done and what is being done
std::vector<CandidateResult> evaluate(const Dump& dump, std::vector<Candidate>& candidates, const EvalRequest& request,
                                      const std::function<void(double, const std::string&)>& say);

/// All candidates but the first, all metrics that both have.
std::vector<Comparison> compare_all(const std::vector<CandidateResult>& results, std::uint64_t seed);

}  // namespace kvq
