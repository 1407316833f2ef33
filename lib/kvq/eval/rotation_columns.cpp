#include <kvq/codec/codec.h>
#include <kvq/codec/poisoned.h>
#include <kvq/codec/rotation_matrix.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/error.h>
#include <kvq/eval/rotation_columns.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace kvq {

namespace {

constexpr std::int64_t kMostTokens = 2048;

std::vector<std::int64_t> spaced_tokens(std::int64_t tokens) {
  const std::int64_t count = std::min(tokens, kMostTokens);
  std::vector<std::int64_t> chosen;
  chosen.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) chosen.push_back(i * tokens / count);
  return chosen;
}

/// First channels of the groups that share a scale, and behind them dim.
std::vector<std::size_t> group_borders(const TensorPlan& plan, int kv_head, int dim) {
  std::vector<std::size_t> borders;
  const auto d = static_cast<std::size_t>(dim);
  if (plan.allocation) {
    const RowLayout layout = row_layout(plan, plan.rotation.head_index(kv_head), dim);
    for (int s = 0; s < layout.num_segments; ++s)
      borders.push_back(static_cast<std::size_t>(layout.segments[static_cast<std::size_t>(s)].first_channel));
    if (layout.num_segments == 0) return borders;  // a head without any codes
    const CodeSegment& last = layout.segments[static_cast<std::size_t>(layout.num_segments - 1)];
    borders.push_back(static_cast<std::size_t>(last.first_channel + last.channels));
    return borders;
  }
  const auto group = group_size(plan.coder) > 0 ? static_cast<std::size_t>(group_size(plan.coder)) : d;
  for (std::size_t first = 0; first <= d; first += group) borders.push_back(first);
  return borders;
}

/// max / mean of the mean squares of the queries' rotated channels: diag(A^-1 C A^-T), C = mean q q^T.
double importance_peak(const LayerActivations& layer, const TensorPlan& plan, int kv_head,
                       std::span<const std::int64_t> tokens) {
  const auto d = static_cast<std::size_t>(layer.geometry.head_dim);
  const std::vector<double> inverse =
      inverse_matrix(plan.rotation, plan.rotation.head_index(kv_head), layer.geometry.head_dim);
  std::vector<double> importance(d, 0.0);
  std::vector<float> q(d);
  const int group = layer.geometry.queries_per_kv_head();
  for (int g = 0; g < group; ++g)
    for (const std::int64_t token : tokens) {
      layer.q.load_head(kv_head * group + g, token, 1, q.data());
      for (std::size_t j = 0; j < d; ++j) {
        double rotated = inverse.empty() ? double{q[j]} : 0.0;
        for (std::size_t i = 0; i < d && !inverse.empty(); ++i) rotated += double{q[i]} * inverse[j * d + i];
        importance[j] += rotated * rotated;
      }
    }
  const double mean = std::accumulate(importance.begin(), importance.end(), 0.0) / static_cast<double>(d);
  return mean > 0.0 ? *std::max_element(importance.begin(), importance.end()) / mean : 0.0;
}

}  // namespace

RotationColumns rotation_columns(const LayerActivations& layer, const TensorPlan& plan, int kv_head) {
  KVQ_ASSERT(!plan.centroids || !plan.centroids->joint);
  const int dim = layer.geometry.head_dim;
  const auto d = static_cast<std::size_t>(dim);
  const std::vector<std::int64_t> tokens = spaced_tokens(layer.k.tokens);
  const std::vector<std::size_t> borders = group_borders(plan, kv_head, dim);
  const RowCodec codec(plan, kv_head, dim);
  RotationColumns columns;
  std::vector<float> k(d), x(d), decoded(d);
  for (const std::int64_t token : tokens) {
    layer.k.load_head(kv_head, token, 1, k.data());
    rotate_row(plan, kv_head, k, x,
               plan.centroids ? nearest_centroid(*plan.centroids, plan.rotation.head_index(kv_head), k) : 0);
    for (const float value : x) columns.largest = std::max(columns.largest, std::abs(double{value}));
    for (std::size_t g = 0; g + 1 < borders.size(); ++g) {
      const auto [lo, hi] = std::minmax_element(x.begin() + static_cast<std::ptrdiff_t>(borders[g]),
                                                x.begin() + static_cast<std::ptrdiff_t>(borders[g + 1]));
      columns.group_range += (double{*hi} - double{*lo}) / static_cast<double>(borders.size() - 1);
    }
    expect_finite(x);
    decoded = x;
    codec.quantize(decoded);
    for (std::size_t j = 0; j < d; ++j)
      columns.error_trace += (double{x[j]} - double{decoded[j]}) * (double{x[j]} - double{decoded[j]});
  }
  columns.group_range /= static_cast<double>(tokens.size());
  columns.error_trace /= static_cast<double>(tokens.size());
  columns.importance_peak = importance_peak(layer, plan, kv_head, tokens);
  return columns;
}

}  // namespace kvq
