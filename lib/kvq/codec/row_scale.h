#pragma once

#include <kvq/codec/group_coder.h>

#include <cstdint>
#include <span>

namespace kvq {

/// The one scale of a row of mixed widths: packing.md, "One scale a row".
struct RowScale {
  ScaleRule rule = ScaleRule::norm;  ///< norm, least_squares or rms
  ScaleType type = ScaleType::fp16;

  /// @param groups  segments with their gains, the widest first, at least one
  /// @param row     [D] finite; @param codes [D], written for channels of a group
  /// @return        the stored scale
  float encode(std::span<const ChannelGroup> groups, std::span<const float> row, std::span<std::uint8_t> codes) const;
  /// @param out  [D], written for channels of a group
  static void decode(std::span<const ChannelGroup> groups, std::span<const std::uint8_t> codes, float scale,
                     std::span<float> out);
};

}  // namespace kvq
