#include "api_expected.h"

#include <kvq/codec/codec.h>
#include <kvq/core/dtype.h>

#include <algorithm>
#include <cmath>

namespace kvq::test {

namespace {

/// A token's rows [Hkv, D] of one side after the cache has stored them.
std::vector<float> stored(const TensorPlan& plan, std::span<const float> rows, bool coded) {
  std::vector<float> all;
  for (std::size_t head = 0; head < rows.size() / kDim; ++head) {
    std::vector<float> x_rot(kDim), back(kDim);
    rotate_row(plan, static_cast<int>(head), rows.subspan(head * kDim, kDim), x_rot);
    if (!coded) quantize_exact(x_rot);
    const std::size_t entry = static_cast<std::size_t>(plan.rotation.head_index(static_cast<int>(head)));
    if (coded) quantize_row(plan.coder, plan.clip_ratio.empty() ? 1.0 : plan.clip_ratio[entry], x_rot);
    unrotate_row(plan, static_cast<int>(head), x_rot, back);
    all.insert(all.end(), back.begin(), back.end());
  }
  return all;
}

}  // namespace

std::vector<float> floats(std::span<const std::uint16_t> bits) {
  std::vector<float> x(bits.size());
  std::transform(bits.begin(), bits.end(), x.begin(), bf16_to_float);
  return x;
}

ExpectedRow::ExpectedRow(const TensorPlan& plan, std::span<const float> rows)
    : exact(stored(plan, rows, false)), coded(stored(plan, rows, true)) {}

void Expected::grow(const LayerPlan& plan, std::span<const float> key, std::span<const float> value) {
  k.emplace_back(plan.k, key);
  v.emplace_back(*plan.v, value);
}

std::vector<double> attend_expected(const LayerPlan& plan, const Windows& windows, const Expected& s,
                                    std::span<const float> q, std::int64_t cached) {
  const LayerGeometry& g = plan.geometry;
  const auto length = static_cast<std::int64_t>(s.k.size());
  const std::int64_t first = g.sliding_window > 0 ? std::max<std::int64_t>(0, length - g.sliding_window) : 0;
  const auto row = [&](const std::vector<ExpectedRow>& side, std::int64_t t, int head) {
    const bool exact = (t < windows.sink_tokens && s.has_sinks) ||
                       t >= std::max((cached ? cached : length) - windows.recent_tokens, s.exact_from);
    const ExpectedRow& token = side[static_cast<std::size_t>(t)];
    return std::span(exact ? token.exact : token.coded).subspan(static_cast<std::size_t>(head) * kDim, kDim);
  };
  std::vector<double> out;
  for (int i = 0; i < g.num_q_heads; ++i) {
    const int head = i / g.queries_per_kv_head();
    const auto query = q.subspan(static_cast<std::size_t>(i) * kDim, kDim);
    std::vector<double> sum(kDim);
    double total = 0.0;
    for (std::int64_t t = first; t < length; ++t) {
      const auto k = row(s.k, t, head), v = row(s.v, t, head);
      double dot = 0.0;
      for (std::size_t c = 0; c < kDim; ++c) dot += static_cast<double>(query[c]) * static_cast<double>(k[c]);
      const double weight = std::exp(dot * g.softmax_scale);
      total += weight;
      for (std::size_t c = 0; c < kDim; ++c) sum[c] += weight * static_cast<double>(v[c]);
    }
    for (const double x : sum) out.push_back(x / total);
  }
  return out;
}

double relative_error(std::span<const float> found, std::span<const double> expected) {
  double error = 0.0, size = 0.0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    error += std::pow(static_cast<double>(found[i]) - expected[i], 2);
    size += expected[i] * expected[i];
  }
  return std::sqrt(error / size);
}

Comparison compare(std::span<const float> found, std::span<const double> expected) {
  std::vector<float> rounded(expected.begin(), expected.end());
  quantize_exact(rounded);
  return {relative_error(found, expected), 2.0 * relative_error(rounded, expected) + 1e-4};
}

}  // namespace kvq::test
