#pragma once

#include <kvq/runtime/kernels/common/generic_rows.cuh>
#include <kvq/runtime/kernels/common/generic_trellis.cuh>

namespace kvq::generic {

/// The value that a channel's code stands for, before gain and scale (packing.md, "One scale a row"). Not of affine
/// codes. @param codes  of the channel's group [count]
__device__ __forceinline__ float unit_value(const RowSegment& segment, const float* tables, const std::uint8_t* codes,
                                            int count, int channel) {
  const int bits = segment.place.bits;
  const float* table = tables + segment.table;
  if (segment.kind == CodeKind::trellis) return trellis_value(table, bits, segment.memory, codes, count, channel);
  if (segment.kind == CodeKind::codebook) return table[codes[channel]];
  const float level = static_cast<float>(2 * static_cast<int>(codes[channel]) - (1 << bits) + 1);
  return __fmul_rn(gaussian_step(bits), __fmul_rn(level, 0.5f));
}

}  // namespace kvq::generic
