#pragma once

#include <kvq/plan/scheme.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvq {

/// The search `integer` of trellis codes (packing.md (d)) and its numbers. Costs have the unit 1 / `unit`.
class IntegerSearch {
 public:
  static constexpr int kWarmUp = 40;  ///< steps of the first run before the group, and behind the seam of short groups
  static constexpr int kLeastOpen = 96;   ///< channels; a shorter group has a second run
  static constexpr int kLargestY = 1152;  ///< of y in 1/256
  static constexpr int kFarInUnits = 32;  ///< cost of the states in which the second run does not begin

  explicit IntegerSearch(const TrellisTaps& taps);

  int bits() const { return bits_; }
  int memory() const { return memory_; }
  int unit() const { return unit_; }                            ///< U
  std::span<const std::int32_t> taps() const { return taps_; }  ///< a [b (m + 1)]
  /// What a step costs without gains: F[0] and all F[k]. [2^(b (m + 1))] by window, own code lowest; less than 2^20.
  std::span<const std::int32_t> windows() const { return windows_; }

  /// @param y  [g], g >= TrellisGroup::kLeastChannels; @param codes [g]
  void search(std::span<const float> y, std::span<std::uint8_t> codes) const;

 private:
  /// What each code costs by itself at each channel: the negative sum of the gains X of its bits, times 2^b.
  /// [g, max(2^b, 8)], of fewer codes repeated.
  std::vector<std::int32_t> own_costs(std::span<const float> y) const;

  int bits_, memory_, unit_;
  std::vector<std::int32_t> taps_, windows_;
  std::vector<std::int32_t> packed_;  ///< windows times 2^b, plus the oldest code
};

}  // namespace kvq
