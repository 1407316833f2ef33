#include <kvq/plan/linear_rows.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <span>
#include <variant>

namespace kvq {

namespace {

double sign(std::size_t index, std::size_t bit) { return (index >> bit & 1u) != 0 ? 1.0 : -1.0; }

/// Whether the codes of one head's row are linear in their bits.
struct LinearCodes {
  const RowLayout& row;
  int entry;

  bool operator()(const ExactCoder&) const { return false; }
  bool operator()(const UniformCoder& coder) const { return coder.levels == UniformLevels::symmetric; }
  bool operator()(const CodebookCoder& coder) const {
    const std::span segments = std::span(row.segments).first(static_cast<std::size_t>(row.num_segments));
    return std::all_of(segments.begin(), segments.end(), [&](const CodeSegment& segment) {
      const std::size_t size = std::size_t{1} << segment.bits,
                        first = coder.per_head ? static_cast<std::size_t>(entry) * size : 0;
      return is_linear_table(std::span(coder.tables.at(segment.bits)).subspan(first, size));
    });
  }
  bool operator()(const TrellisCoder&) const { return true; }
};

}  // namespace

std::vector<double> bit_weights(std::span<const float> table) {
  std::vector<double> weights(static_cast<std::size_t>(std::countr_zero(table.size())));
  for (std::size_t bit = 0; bit < weights.size(); ++bit) {
    for (std::size_t c = 0; c < table.size(); ++c) weights[bit] += sign(c, bit) * static_cast<double>(table[c]);
    weights[bit] *= 2.0 / static_cast<double>(table.size());
  }
  return weights;
}

bool is_linear_table(std::span<const float> table) {
  constexpr double kTolerance = 0x1p-21;  // of the largest entry: a few roundings
  const std::vector<double> weights = bit_weights(table);
  double largest = 0.0, error = 0.0;
  for (std::size_t c = 0; c < table.size(); ++c) {
    double value = 0.0;
    for (std::size_t bit = 0; bit < weights.size(); ++bit) value += 0.5 * sign(c, bit) * weights[bit];
    const auto entry = static_cast<double>(table[c]);
    largest = std::max(largest, std::abs(entry)), error = std::max(error, std::abs(entry - value));
  }
  return error <= kTolerance * largest;
}

bool is_linear(const TensorPlan& plan, int kv_head, int dim) {
  if (plan.centroids) return false;
  const RowLayout row = row_layout(plan, kv_head, dim);
  return row.num_numbers <= 1 && std::visit(LinearCodes{row, plan.rotation.head_index(kv_head)}, plan.coder);
}

bool has_linear_rows(const TensorPlan& plan, int num_kv_heads, int dim) {
  for (int head = 0; head < num_kv_heads; ++head)
    if (!is_linear(plan, head, dim)) return false;
  return true;
}

}  // namespace kvq
