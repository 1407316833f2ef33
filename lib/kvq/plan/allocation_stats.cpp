#include <kvq/plan/allocation_stats.h>

#include <kvq/core/error.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace kvq {

WidthHistogram width_histogram(std::span<const std::uint8_t> widths) {
  WidthHistogram histogram{};
  for (const std::uint8_t width : widths) {
    KVQ_ASSERT(width < histogram.size());
    ++histogram[width];
  }
  return histogram;
}

std::span<const std::uint8_t> allocated_widths(const BitAllocation& allocation) {
  return allocation.block_bits.empty() ? allocation.channel_bits : allocation.block_bits;
}

int distinct_widths(const WidthHistogram& histogram) {
  return static_cast<int>(
      std::count_if(histogram.begin(), histogram.end(), [](std::int64_t count) { return count > 0; }));
}

double width_entropy(const WidthHistogram& histogram) {
  double total = 0.0, entropy = 0.0;
  for (const std::int64_t count : histogram) total += static_cast<double>(count);
  for (const std::int64_t count : histogram)
    if (count > 0) entropy += static_cast<double>(count) / total * std::log2(total / static_cast<double>(count));
  return entropy;
}

double ModelWidths::share(int width) const {
  double total = 0.0;
  for (const std::int64_t count : histogram) total += static_cast<double>(count);
  return static_cast<double>(histogram.at(static_cast<std::size_t>(width))) / total;
}

ModelWidths model_widths(std::span<const LayerWidths> layers) {
  KVQ_ASSERT(!layers.empty());
  ModelWidths all;
  all.layers = static_cast<int>(layers.size());
  all.of_blocks = std::none_of(layers.begin(), layers.end(),
                               [](const LayerWidths& layer) { return layer.allocation->block_bits.empty(); });
  std::vector<double> entropies;
  const auto count = static_cast<double>(layers.size());
  for (const LayerWidths& layer : layers) {
    const WidthHistogram own =
        width_histogram(all.of_blocks ? layer.allocation->block_bits : layer.allocation->channel_bits);
    for (std::size_t width = 0; width < own.size(); ++width) all.histogram[width] += own[width];
    const double entropy = width_entropy(own);
    if (entropies.empty() || entropy > all.highest.entropy) all.highest = {entropy, layer.layer};
    if (entropies.empty() || entropy < all.lowest.entropy) all.lowest = {entropy, layer.layer};
    entropies.push_back(entropy);
    all.mean_kinds += distinct_widths(own) / count;
    all.mean_entropy += entropy / count;
  }
  double squares = 0.0;
  for (const double entropy : entropies) squares += (entropy - all.mean_entropy) * (entropy - all.mean_entropy);
  all.entropy_deviation = std::sqrt(squares / count);
  return all;
}

void AllocationDistance::add(std::span<const std::uint8_t> bits, std::span<const std::uint8_t> reference_bits,
                             std::span<const float> scores) {
  KVQ_ASSERT(bits.size() == reference_bits.size() && bits.size() == scores.size());
  slots += static_cast<std::int64_t>(bits.size());
  for (std::size_t i = 0; i < bits.size(); ++i) {
    const int own = bits[i], wanted = reference_bits[i];
    changed += own != wanted;
    high_in_both += own >= kHighBits && wanted >= kHighBits;
    high_in_any += own >= kHighBits || wanted >= kHighBits;
    // Multiplying by a power of four is exact, so equal widths add exactly zero.
    const double score = scores[i], cost = std::ldexp(score, -2 * wanted);
    excess += std::ldexp(score, -2 * own) - cost;
    reference_cost += cost;
  }
}

void AllocationDistance::merge(const AllocationDistance& other) {
  slots += other.slots;
  changed += other.changed;
  high_in_both += other.high_in_both;
  high_in_any += other.high_in_any;
  excess += other.excess;
  reference_cost += other.reference_cost;
}

double AllocationDistance::hamming() const {
  return slots == 0 ? 0.0 : static_cast<double>(changed) / static_cast<double>(slots);
}

double AllocationDistance::high_bit_jaccard() const {
  return high_in_any == 0 ? 1.0 : static_cast<double>(high_in_both) / static_cast<double>(high_in_any);
}

double AllocationDistance::regret() const { return reference_cost > 0.0 ? excess / reference_cost : 0.0; }

}  // namespace kvq
