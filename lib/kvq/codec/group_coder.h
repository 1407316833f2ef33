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

/// A trellis ready to code with: the values of every window of codes, for 0 .. memory codes before the channel.
class TrellisGroup {
 public:
  TrellisGroup(const TrellisTaps& taps, ScaleRule rule, ScaleType type);
  float encode(std::span<const float> x, std::span<std::uint8_t> codes) const;
  void decode(std::span<const std::uint8_t> codes, float scale, std::span<float> out) const;

 private:
  void viterbi(std::span<const float> y, std::span<std::uint8_t> codes) const;
  void values(std::span<const std::uint8_t> codes, std::span<float> out) const;

  int bits_, memory_;
  std::vector<std::vector<float>> values_;  ///< [memory + 1] tables; table k has 2^(b (k+1)) entries, own code lowest
  ScaleRule rule_;
  ScaleType type_;
};

}  // namespace kvq
