#pragma once

#include <kvq/plan/scheme.h>

#include <cstdint>
#include <span>
#include <vector>

/// Codes of one group, packing.md (c) and (d): what RowCodec is made of.
namespace kvq {

/// A codebook ready to code with.
class CodebookGroup {
 public:
  /// @param table  [2^b] ascending
  CodebookGroup(std::span<const float> table, ScaleRule rule, ScaleType type);
  /// @param x      [g] finite; @param codes [g]
  /// @return       the stored scale
  float encode(std::span<const float> x, std::span<std::uint8_t> codes) const;
  void decode(std::span<const std::uint8_t> codes, float scale, std::span<float> out) const;

 private:
  std::vector<float> table_, thresholds_;
  ScaleRule rule_;
  ScaleType type_;
};

/// A trellis ready to code with: tail-biting, so that the codes before the first channel are the last ones.
class TrellisGroup {
 public:
  static constexpr int kLeastChannels = 8;  ///< shorter groups are coded as symmetric
  TrellisGroup(const TrellisTaps& taps, ScaleRule rule, ScaleType type);
  /// @param x  [g], g >= kLeastChannels
  float encode(std::span<const float> x, std::span<std::uint8_t> codes) const;
  void decode(std::span<const std::uint8_t> codes, float scale, std::span<float> out) const;

 private:
  /// The state one channel before, from the codes that the survivors dropped, [S].
  std::size_t step_back(std::size_t state, const std::uint8_t* oldest) const;
  /// State before the first channel: the first run of packing.md.
  std::size_t seam_state(std::span<const float> y) const;
  void viterbi(std::span<const float> y, std::span<std::uint8_t> codes) const;
  void values(std::span<const std::uint8_t> codes, std::span<float> out) const;

  int bits_, memory_;
  std::vector<float> values_;  ///< [2^(b (m+1))] by window, own code lowest
  ScaleRule rule_;
  ScaleType type_;
};

}  // namespace kvq
