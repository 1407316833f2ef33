#include <kvq/runtime/part_rounding.h>

#include <kvq/codec/codec.h>
#include <kvq/codec/golden_rows.h>
#include <kvq/core/dtype.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace kvq {

namespace {

/// For each column of a head's matrix [D, D], or each row if `turned`: the sum of (x_i * element)^2.
std::vector<double> squared_terms(const std::vector<float>& matrices, std::size_t entry, std::span<const float> x,
                                  bool turned) {
  const std::size_t d = x.size();
  std::vector<double> sums(d);
  for (std::size_t i = 0; i < d; ++i)
    for (std::size_t j = 0; j < d; ++j) {
      const double term = static_cast<double>(x[i]) *
                          static_cast<double>(matrices[(entry * d + (turned ? j : i)) * d + (turned ? i : j)]);
      sums[j] += term * term;
    }
  return sums;
}

double largest_root(const std::vector<double>& squares) {
  return std::sqrt(*std::max_element(squares.begin(), squares.end()));
}

std::vector<float> row_of(const std::vector<std::uint16_t>& bits, std::size_t row, std::size_t dim) {
  std::vector<float> x(dim);
  std::transform(bits.begin() + static_cast<std::ptrdiff_t>(row * dim),
                 bits.begin() + static_cast<std::ptrdiff_t>((row + 1) * dim), x.begin(), bf16_to_float);
  return x;
}

/// The largest magnitude.
double size_of(std::span<const float> x) {
  float largest = 0.0f;
  for (const float value : x) largest = std::max(largest, std::abs(value));
  return static_cast<double>(largest);
}

void soften(const TensorPlan& plan, int num_kv_heads, int dim, const std::vector<std::uint16_t>& tokens,
            GoldenSide& side) {
  if (plan.rotation.inverse.empty()) return;
  const auto heads = static_cast<std::size_t>(num_kv_heads), d = static_cast<std::size_t>(dim);
  const std::size_t row_bytes = side.firm.empty() ? 0 : side.bytes.size() / side.firm.size();
  std::vector<float> x_rot(d);
  for (std::size_t row = 0; row < side.firm.size(); ++row) {
    const auto head = static_cast<int>(row % heads);
    const std::vector<float> x = row_of(tokens, row, d);
    rotate_row(plan, head, x, x_rot);
    const double step = 4.0 * row_rounding(plan.rotation, head, x);
    constexpr double kFirmAgainst = 0x1p-18;  // margin of firm rows in artifacts, relative to the largest channel
    if (!side.firm[row] || step <= kFirmAgainst * size_of(x_rot)) continue;
    const auto bytes = std::span(side.bytes).subspan(row * row_bytes, row_bytes);
    side.firm[row] = survives_probes(plan, head, x_rot, static_cast<float>(step), bytes);
  }
}

}  // namespace

double row_rounding(const Rotation& rotation, int kv_head, std::span<const float> x) {
  if (rotation.kind != RotationKind::dense) return 0.0;
  const auto entry = static_cast<std::size_t>(rotation.head_index(kv_head));
  return kPartRounding * largest_root(squared_terms(rotation.matrix, entry, x, false));
}

GoldenRows golden_in_parts(const LayerPlan& plan, GoldenRows rows) {
  const LayerGeometry& g = plan.geometry;
  soften(plan.k, g.num_kv_heads, g.head_dim, rows.tokens.k, rows.k);
  if (plan.v) soften(*plan.v, g.num_kv_heads, g.v_head_dim, rows.tokens.v, rows.v);
  return rows;
}

double output_rounding(const LayerPlan& plan, const GoldenRows& rows, int query_head) {
  const LayerGeometry& g = plan.geometry;
  const int head = query_head / g.queries_per_kv_head();
  const auto heads = static_cast<std::size_t>(g.num_kv_heads), h = static_cast<std::size_t>(head);
  const auto d = static_cast<std::size_t>(g.head_dim), dv = static_cast<std::size_t>(g.v_head_dim);
  const std::span<const float> out = std::span(rows.out).subspan(static_cast<std::size_t>(query_head) * dv, dv);
  double error = 0.0;
  if (!plan.k.rotation.inverse.empty()) {
    // Error of the scores, times the largest distance of a value from the result.
    const std::vector<float> q = row_of(rows.tokens.q, static_cast<std::size_t>(query_head), d);
    const std::vector<double> terms =
        squared_terms(plan.k.rotation.inverse, static_cast<std::size_t>(plan.k.rotation.head_index(head)), q, true);
    double score = 0.0, far = 0.0;
    std::vector<float> y(d);
    for (std::size_t t = 0; t < static_cast<std::size_t>(rows.tokens.count); ++t) {
      rotate_row(plan.k, head, row_of(rows.tokens.k, t * heads + h, d), y);
      double squares = 0.0;
      for (std::size_t j = 0; j < d; ++j) squares += terms[j] * static_cast<double>(y[j]) * static_cast<double>(y[j]);
      score = std::max(score, kPartRounding * g.softmax_scale * std::sqrt(squares));
      const std::vector<float> v = row_of(rows.tokens.v, t * heads + h, dv);
      for (std::size_t c = 0; c < dv; ++c) far = std::max(far, static_cast<double>(std::abs(v[c] - out[c])));
    }
    error += score * far;
  }
  if (plan.v && !plan.v->rotation.inverse.empty()) {
    std::vector<float> rotated(dv);
    rotate_row(*plan.v, head, out, rotated);
    error += kPartRounding *
             largest_root(squared_terms(plan.v->rotation.inverse,
                                        static_cast<std::size_t>(plan.v->rotation.head_index(head)), rotated, false));
  }
  return 4.0 * error / std::max(size_of(out), 1e-30);
}

}  // namespace kvq
