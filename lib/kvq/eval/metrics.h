#pragma once

#include <kvq/eval/attention_error.h>
#include <kvq/eval/summary.h>

#include <array>
#include <cstddef>
#include <iterator>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

/// The metrics of kvq-eval and kvq-diff (formats/eval.md). A metric is one row of kMetrics: flags, help texts, columns,
/// documents, readings, means and intervals derive from the row.
namespace kvq {

/// What a metric is read from. The source decides which parts of a layer have the metric.
enum class MetricSource {
  rows,         ///< errors of stored rows: of KV heads and layers
  queries,      ///< sums over queries: of KV heads, layers and buckets of contexts
  projection,   ///< errors behind o_proj, which mixes all heads: of layers
  rope_logits,  ///< RopeLogitError, which ignores exact windows and needs no attention: of KV heads and layers
};

/// Sum of squared errors, and of squares of what is exact.
struct ErrorSum {
  double error = 0.0, energy = 0.0;
};

/// The sums of one part of a layer: a KV head, all heads, or a bucket of contexts. A member is missing if the part has
/// no such sums.
struct MetricSums {
  std::optional<ErrorSum> k, v;            ///< of rows, over tokens; `v` is missing for a layer without values, too
  std::optional<AttentionSums> attention;  ///< over queries
  std::optional<ErrorSum> projected;       ///< behind o_proj
  std::optional<double> rope_logit_mae;
  double tokens = 0.0;                            ///< of the queries in `attention`
  bool has_values = true, has_curvature = false;  ///< whether `attention` has errors of outputs, and in nats
};

/// The value of a metric that does not apply or was not requested.
inline constexpr double kNoValue = std::numeric_limits<double>::quiet_NaN();

struct MetricRow {
  std::string_view name;     ///< in flags, documents and rules
  std::string_view header;   ///< of a column
  std::string_view unit;     ///< empty for a ratio
  std::string_view summary;  ///< for help texts
  bool more_is_better = false;
  /// Compares attention weights, which mean nothing if logits are not finite.
  bool of_weights = false;
  /// Measured only if asked for by name (EvalRequest::with_context), because it costs time.
  bool on_request = false;
  MetricSource source = MetricSource::rows;
  /// Reads the metric from sums that have its source. kNoValue if the metric does not apply to the layer.
  double (*read)(const MetricSums&) = nullptr;
  /// Numbers of single queries, of which the metric is the mean. Documents then hold their distribution.
  std::vector<float> HeadError::* per_query = nullptr;
  std::string_view query_summary = {};                      ///< the number of a single query, for help texts
  std::string_view definition = "formats/eval.md#metrics";  ///< file and heading
};

// clang-format off
/// The order is that of help texts, comparisons and readings.
inline constexpr MetricRow kMetrics[] = {
    {.name = "k_rel_mse", .header = "K", .unit = "",
     .summary = "sum |k^ - k|^2 / sum |k|^2 over the tokens, as read from the end of a sequence",
     .source = MetricSource::rows,
     .read = [](const MetricSums& sums) { return ratio_of(sums.k->error, sums.k->energy); }},
    {.name = "v_rel_mse", .header = "V", .unit = "",
     .summary = "the same of values",
     .source = MetricSource::rows,
     .read = [](const MetricSums& sums) { return sums.v ? ratio_of(sums.v->error, sums.v->energy) : kNoValue; }},
    {.name = "logit_rel_mse", .header = "QK", .unit = "",
     .summary = "sum (l^ - l)^2 / sum l^2 of the logits l = scale q k that a query sees",
     .source = MetricSource::queries,
     .read = [](const MetricSums& sums) {
       return ratio_of(sums.attention->logit_error, sums.attention->logit_energy);
     }},
    {.name = "rope_logit_mae", .header = "RoPE MAE", .unit = "logits",
     .summary = "mean |q^T R_D (k^ - k)| over 50 offsets D (Block-GTQ B.3), without windows",
     .source = MetricSource::rope_logits,
     .read = [](const MetricSums& sums) { return *sums.rope_logit_mae; }},
    {.name = "sv_rel_mse", .header = "SV", .unit = "",
     .summary = "sum |S (V^ - V)|^2 / sum |S V|^2, exact weights S",
     .source = MetricSource::queries,
     .read = [](const MetricSums& sums) {
       return sums.has_values ? ratio_of(sums.attention->sv_error, sums.attention->output_energy) : kNoValue;
     }},
    {.name = "attention_kl", .header = "KL", .unit = "nats",
     .summary = "KL(p || p^) of a query's weights, nats",
     .of_weights = true,
     .source = MetricSource::queries,
     .read = [](const MetricSums& sums) { return ratio_of(sums.attention->divergence, sums.attention->queries); },
     .per_query = &HeadError::divergence,
     .query_summary = "KL(p || p^)"},
    {.name = "top10_overlap", .header = "top-10", .unit = "",
     .summary = "part of the 10 largest weights that stay so",
     .more_is_better = true,
     .of_weights = true,
     .source = MetricSource::queries,
     .read = [](const MetricSums& sums) {
       const AttentionSums& a = *sums.attention;
       return a.top_queries > 0.0 ? a.top_hits / (10.0 * a.top_queries) : kNoValue;
     }},
    {.name = "attention_kl_b4", .header = "KL B.4", .unit = "nats",
     .summary = "KL without the query's own key, queries of the second half of a sequence (Block-GTQ B.4)",
     .of_weights = true,
     .on_request = true,
     .source = MetricSource::queries,
     .read = [](const MetricSums& sums) {
       const ContextSums& c = sums.attention->context;
       return c.queries > 0.0 ? c.divergence / c.queries : kNoValue;
     }},
    {.name = "top10_overlap_b4", .header = "top-10 B.4", .unit = "",
     .summary = "top10_overlap of the same queries and keys (Block-GTQ B.4)",
     .more_is_better = true,
     .of_weights = true,
     .on_request = true,
     .source = MetricSource::queries,
     .read = [](const MetricSums& sums) {
       const ContextSums& c = sums.attention->context;
       return c.top_queries > 0.0 ? c.top_hits / (10.0 * c.top_queries) : kNoValue;
     }},
    {.name = "output_rel_mse", .header = "output", .unit = "",
     .summary = "sum |o^ - o|^2 / sum |o|^2 of attention's outputs",
     .source = MetricSource::queries,
     .read = [](const MetricSums& sums) {
       return sums.has_values ? ratio_of(sums.attention->output_error, sums.attention->output_energy) : kNoValue;
     }},
    {.name = "o_proj_rel_mse", .header = "o_proj", .unit = "",
     .summary = "the same behind the output projection, where the dump has it",
     .source = MetricSource::projection,
     .read = [](const MetricSums& sums) { return ratio_of(sums.projected->error, sums.projected->energy); }},
    {.name = "output_nats", .header = "nats", .unit = "nats",
     .summary = "mean 1/2 (o^ - o)^T G (o^ - o), summed over heads; G the dump's output curvature",
     .source = MetricSource::queries,
     .read = [](const MetricSums& sums) {
       return sums.has_values && sums.has_curvature ? sums.attention->curved_error / sums.tokens : kNoValue;
     }},
};
// clang-format on

/// A row of kMetrics.
class Metric {
 public:
  /// A name that no row has does not compile.
  consteval explicit Metric(std::string_view name) {
    while (index_ < std::size(kMetrics) && kMetrics[index_].name != name) ++index_;
    if (index_ == std::size(kMetrics)) throw "no metric has this name";
  }
  constexpr explicit Metric(std::size_t index) : index_(index) {}
  constexpr std::size_t index() const { return index_; }
  constexpr const MetricRow* operator->() const { return &kMetrics[index_]; }
  constexpr bool operator==(const Metric&) const = default;

 private:
  std::size_t index_ = 0;
};

/// All metrics, in the order of kMetrics.
const std::vector<Metric>& all_metrics();
/// @throws Error{usage} listing the names
Metric find_metric(std::string_view name);

/// Something for each metric.
template <typename T>
class PerMetric {
 public:
  T& operator[](Metric metric) { return items_[metric.index()]; }
  const T& operator[](Metric metric) const { return items_[metric.index()]; }

 private:
  std::array<T, std::size(kMetrics)> items_{};
};

/// kNoValue: the metric does not apply (no values, no o_proj, ...) or was not requested.
using Values = PerMetric<double>;
/// kNoValue for each metric.
Values no_values();
/// The value of each metric whose source is in `sums`.
Values read_values(const MetricSums& sums);

}  // namespace kvq
