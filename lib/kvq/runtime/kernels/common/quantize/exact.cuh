#pragma once

#include <kvq/runtime/kernels/common/quantize/rows.cuh>

/// Exact tiles: rows of bfloat16 in windows and in pages (formats/pages.md, "Exact tiles"). Lane 4 g + t has eight
/// neighboring channels of every step: one chunk. Transposed values are in the order of permuted channels
/// (value_place()); of each chunk of them, the four lanes have two neighboring permuted channels each.
namespace kvq::write {

/// Which of a lane's channels has the permuted channel 8 * chunk + 2 t + half in transposed values.
struct TransposedChannel {
  int step, element;
};
template <typename Side>
__device__ constexpr TransposedChannel transposed_channel(int chunk, int half) {
  const int channel = value_channel(Side::side(), 8 * chunk + half);  // of lane t = 0; lane t has channel + 8 t
  return {channel / 32, channel % 32};
}

/// Two channels of an exact row: rounded and saturated, but NaN if they are not finite.
__device__ __forceinline__ unsigned pack_exact(float low, float high) {
  const unsigned two = pack_bf16(low, high);
  return (is_finite(low) ? two & 0xFFFFu : 0x7FC0u) | (is_finite(high) ? two & 0xFFFF0000u : 0x7FC00000u);
}

/// Eight of them. They are rounded without a look at their ends first, and once more if one became infinite or NaN.
/// @param channel  channel(i) of the eight
template <typename Channel>
__device__ __forceinline__ void pack_exact(Channel channel, unsigned (&words)[4]) {
  __nv_bfloat162 most = __halves2bfloat162(__ushort_as_bfloat16(0), __ushort_as_bfloat16(0));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(channel(2 * i), channel(2 * i + 1));
    most = __hmax2_nan(most, __habs2(two));
    words[i] = *reinterpret_cast<const unsigned*>(&two);
  }
  // Adding the last bit of an exponent carries into the sign if all bits of the exponent are set.
  if ((*reinterpret_cast<const unsigned*>(&most) + 0x00800080u) & 0x80008000u) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack_exact(channel(2 * i), channel(2 * i + 1));
  }
}

/// @param row      destinations of the tokens g and g + 8; negative: not stored
/// @param tile_of  destination row -> first byte of this side's tile
/// @param value    values are stored transposed, unless the layer's pages are exact, too, or have bit tiles
template <typename Side, typename TileOf>
__device__ __forceinline__ void store_exact(const Rows<Side>& rows, const std::int64_t (&row)[2], TileOf tile_of,
                                            bool value, int lane) {
  constexpr int kDim = Side::kHeadDim;
  const int t = lane & 3;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row[r] < 0) continue;
    std::byte* tile = tile_of(row[r]);
    const int token = static_cast<int>(row[r]) & (kTileTokens - 1);
    const auto& x = rows.x[r];
    unsigned words[4];
    if (Side::kExact || Side::side().is_bits() || !value) {
#pragma unroll
      for (int j = 0; j < Rows<Side>::kSteps; ++j) {
        pack_exact([&](int i) { return x[j][i] * rows.row_scale; }, words);
        *reinterpret_cast<uint4*>(tile + exact_offset(kDim, token, 32 * j + 8 * t)) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    } else if constexpr (!Side::kExact && !Side::side().is_bits()) {
      static_assert(kDim % 32 == 0);
#pragma unroll
      for (int chunk = 0; chunk < kDim / 8; chunk += 4) {
        const auto channel = [&](int i) {
          const TransposedChannel from = transposed_channel<Side>(chunk + i / 2, i % 2);
          return x[from.step][from.element] * rows.row_scale;
        };
        pack_exact(channel, words);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          *reinterpret_cast<unsigned*>(tile + exact_offset(kDim, token, 8 * (chunk + i) + 2 * t)) = words[i];
      }
    }
  }
}

}  // namespace kvq::write
