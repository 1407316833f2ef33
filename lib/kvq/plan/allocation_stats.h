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

/// The widths that the statistics of Appendix B.2 count: of all (head, block) pairs, or where channels got the bits of
/// all (head, channel) pairs.
std::span<const std::uint8_t> allocated_widths(const BitAllocation& allocation);

/// Widths that occur: "grps" of Appendix B.2, which has no width 0; here it counts as one.
int distinct_widths(const WidthHistogram& histogram);

/// Shannon entropy of the widths in bits; 0 for one width, or none at all.
double width_entropy(const WidthHistogram& histogram);

/// Distance of widths from those of a reference over the same slots, (layer, KV head, RoPE block) triples. A sum over
/// slots: add() them layer by layer, or merge() the layers; how they were split does not matter beyond rounding.
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
  /// Slots that both protect over slots that one of them does, Eq. 6; 1 if none does.
  double high_bit_jaccard() const;
  /// What these widths cost more than the reference's, relative, by the reference's scores: Eq. 7. Negative where they
  /// are cheaper, as with more bits; 0 if the scores are all 0.
  double regret() const;
};

}  // namespace kvq
