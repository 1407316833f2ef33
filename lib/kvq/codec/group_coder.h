#pragma once

#include <kvq/codec/integer_search.h>
#include <kvq/plan/scheme.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

/// Quantize one group, packing.md (c) and (d). RowCodec uses both classes.
namespace kvq {

/// Quantizes groups with one codebook.
class CodebookGroup {
 public:
  /// @param table  [2^b] ascending
  CodebookGroup(std::span<const float> table, ScaleRule rule, ScaleType type);
  /// @param x      [g] finite; @param codes [g]
  /// @return       the stored scale
  float encode(std::span<const float> x, std::span<std::uint8_t> codes) const;
  void decode(std::span<const std::uint8_t> codes, float scale, std::span<float> out) const;
  /// The codes whose entries are nearest to y, with the scale left out. @param y  [g]; @param codes [g]
  void search(std::span<const float> y, std::span<std::uint8_t> codes) const;
  /// The entries of the codes. @param codes  [g]; @param out [g]
  void values_of(std::span<const std::uint8_t> codes, std::span<float> out) const;

  std::span<const float> table() const { return table_; }            ///< [2^b]
  std::span<const float> thresholds() const { return thresholds_; }  ///< [2^b - 1] a code counts those at or below y
  ScaleRule rule() const { return rule_; }
  ScaleType type() const { return type_; }

 private:
  std::vector<float> table_, thresholds_;
  ScaleRule rule_;
  ScaleType type_;
};

/// Quantizes groups with one trellis. The trellis is tail-biting: the codes before the first channel are those of the
/// last channels.
class TrellisGroup {
 public:
  static constexpr int kLeastChannels = 8;  ///< shorter groups get symmetric codes
  TrellisGroup(const TrellisTaps& taps, ScaleRule rule, ScaleType type);
  /// @param x  [g], g >= kLeastChannels
  float encode(std::span<const float> x, std::span<std::uint8_t> codes) const;
  void decode(std::span<const std::uint8_t> codes, float scale, std::span<float> out) const;
  /// The codes whose values are nearest to y, with the scale left out.
  /// @param y  [g], g >= kLeastChannels; @param codes [g]
  void search(std::span<const float> y, std::span<std::uint8_t> codes) const;
  /// v of packing.md (d). @param codes  [g]; @param out [g]
  void values_of(std::span<const std::uint8_t> codes, std::span<float> out) const;

  /// Search `binary32`: channels on each side of the seam (between last and first channel) that decide the state there.
  static constexpr std::size_t kSeamLength = 32;
  static constexpr std::size_t kMostStates = 256;
  int bits() const { return bits_; }
  int memory() const { return memory_; }
  std::span<const float> values() const { return values_; }  ///< [2^(b (m+1))] by window, own code lowest
  ScaleRule rule() const { return rule_; }
  ScaleType type() const { return type_; }
  /// What kernels read: values(); if the search is in integers, behind them IntegerSearch::windows(), then its taps(),
  /// both as floats, which represent them exactly.
  std::vector<float> kernel_table() const;
  /// Null if the trellis is searched in binary32.
  const IntegerSearch* integer_search() const { return integer_search_ ? &*integer_search_ : nullptr; }

 private:
  /// State before the first channel, from the first Viterbi run of the search `binary32` of packing.md.
  std::size_t seam_state(std::span<const float> y) const;

  int bits_, memory_;
  std::vector<float> values_;
  ScaleRule rule_;
  ScaleType type_;
  std::optional<IntegerSearch> integer_search_ = {};
};

/// Channels [first, first + count) of a row, which have one width, and one scale unless the row has one scale.
struct ChannelGroup {
  int first, count;
  std::variant<UniformCoder, CodebookGroup, TrellisGroup> coder;
  float gain = 1.0f;  ///< of a row with one scale (packing.md, "One scale a row")
};

}  // namespace kvq
