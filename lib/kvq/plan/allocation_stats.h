#pragma once

#include <kvq/plan/layer_plan.h>

#include <array>
#include <cstdint>
#include <span>

/// Numbers that describe mixed widths, and how far two allocations are apart (Block-GTQ, Appendices B.2 and C.4).
namespace kvq {

/// How often each width 0..8 occurs.
using WidthHistogram = std::array<std::int64_t, 9>;

/// @param widths  any number of widths, each 0..8
WidthHistogram width_histogram(std::span<const std::uint8_t> widths);

/// The widths that the statistics of Appendix B.2 count: one for each (head, RoPE block) or, if the allocation gave
/// widths to single channels, one for each (head, channel).
std::span<const std::uint8_t> allocated_widths(const BitAllocation& allocation);

/// Number of different widths that occur, "grps" of Appendix B.2. Width 0, which the paper does not have, counts too.
int distinct_widths(const WidthHistogram& histogram);

/// Shannon entropy of the widths in bits; 0 if at most one width occurs.
double width_entropy(const WidthHistogram& histogram);

/// The widths of one layer's keys or values.
struct LayerWidths {
  int layer = 0;
  const BitAllocation* allocation = nullptr;
};

/// The widths of all layers of one side (Block-GTQ Tables 8 to 10).
struct ModelWidths {
  /// An entropy, and the layer that has it.
  struct Extreme {
    double entropy = 0.0;
    int layer = 0;
  };

  int layers = 0;
  /// Whether all numbers count RoPE blocks. They count channels if any layer gave widths to single channels.
  bool of_blocks = true;
  WidthHistogram histogram{};      ///< over all layers and heads
  double mean_kinds = 0.0;         ///< mean over layers of distinct_widths(), "grps"
  double mean_entropy = 0.0;       ///< mean over layers of width_entropy()
  double entropy_deviation = 0.0;  ///< root of the mean square of a layer's difference from it
  Extreme highest, lowest;         ///< the first layer of equal ones

  /// Part of all slots that have this width, 0..1.
  double share(int width) const;
};

/// @param layers  each with an allocation, of one side; at least one
ModelWidths model_widths(std::span<const LayerWidths> layers);

/// Distance of an allocation from a reference allocation. A slot is a (layer, KV head, RoPE block) triple that both
/// have. All fields are sums over slots, so every split of the slots into add() and merge() calls gives the same result
/// up to rounding.
struct AllocationDistance {
  static constexpr int kHighBits = 4;  ///< widths from here on count as protected

  std::int64_t slots = 0, changed = 0;
  std::int64_t high_in_both = 0, high_in_any = 0;
  double excess = 0.0;          ///< sum of s (4^-b - 4^-b_ref)
  double reference_cost = 0.0;  ///< sum of s 4^-b_ref

  /// @param bits, reference_bits  [N] widths 0..8 of the same slots
  /// @param scores                [N] the reference's s, at least 0
  void add(std::span<const std::uint8_t> bits, std::span<const std::uint8_t> reference_bits,
           std::span<const float> scores);
  void merge(const AllocationDistance& other);

  /// Fraction of slots whose width changed, Eq. 5; 0 without slots.
  double hamming() const;
  /// Number of slots that both allocations protect over the number that at least one protects, Eq. 6; 1 if the latter
  /// is 0.
  double high_bit_jaccard() const;
  /// Extra cost of these widths under the reference's scores, relative to the reference's cost, Eq. 7. Negative if
  /// these widths cost less, for example because they spend more bits; 0 if all scores are 0.
  double regret() const;
};

}  // namespace kvq
