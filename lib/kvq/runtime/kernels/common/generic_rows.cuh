#pragma once

#include <kvq/plan/scheme.h>
#include <kvq/runtime/kernels/common/generic_tiles.cuh>
#include <kvq/runtime/kernels/common/page_tiles.cuh>
#include <kvq/runtime/kernels/common/pair.cuh>

/// From rotated rows in shared memory to stored rows, bit for bit as packing.md says; a warp takes a row at a time.
/// Functions that are not inlined have many registers of their own, which the kernel around them would spill.
namespace kvq::generic {

/// A block's 16 rows, one side of one head. @tparam kMostDim  largest head_dim
template <int kMostDim>
struct GenericRows {
  alignas(16) float x[kTileTokens][kMostDim];
  alignas(16) std::byte tile[kTileTokens * kMostDim * 2];  ///< staging buffer for a whole tile of a page
  std::uint8_t codes[kWarps][kMostDim];
  unsigned params[kWarps][2 * kMostDim / 32];
  std::int64_t page[kTileTokens], window[kTileTokens];  ///< destinations of each row; negative: not stored
};

/// False for NaN and infinities, which poison a row (packing.md, "Rows that are not finite").
__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= 3.40282347e38f; }

/// A channel of an exact row as bfloat16: saturates at the largest finite number, as the codec does; NaN if x is not
/// finite.
__device__ __forceinline__ __nv_bfloat16 to_bf16(float x) {
  const float most = __uint_as_float(0x7F7F0000u);
  if (!is_finite(x)) return __ushort_as_bfloat16(0x7FC0);
  return __float2bfloat16_rn(x > most ? most : x < -most ? -most : x);
}

/// Type of the numbers that a side stores beside codes.
struct NumberType {
  int bytes = 2;
  bool bfloat = false;
};

/// stored() of a type that is known at run time.
__device__ __forceinline__ float stored(float x, NumberType type, unsigned& bits) {
  if (type.bytes == 4) {
    const float most = 3.40282347e38f, y = x > most ? most : x < -most ? -most : x;
    bits = __float_as_uint(y);
    return y;
  }
  unsigned short two = 0;
  const float y = type.bfloat ? kvq::stored<true>(x, two) : kvq::stored<false>(x, two);
  bits = two;
  return y;
}

/// step[b] of packing.md (b), b = 1 .. 8.
__device__ __forceinline__ float gaussian_step(int bits) {
  if (bits <= 4) return bits == 1 ? 1.5957691f : bits == 2 ? 0.9956867f : bits == 3 ? 0.58601946f : 0.3352006f;
  return bits == 5 ? 0.18813878f : bits == 6 ? 0.10406301f : bits == 7 ? 0.056867674f : 0.030762387f;
}

template <typename Add>
__device__ __forceinline__ float across_warp(float x, Add add) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) x = add(x, __shfl_xor_sync(kAll, x, step));
  return x;
}

/// A lane's channels of a group: `each` neighboring ones, because packing.md sums neighbors first. A group is padded
/// with zeros to a power of two.
struct LaneChannels {
  int first, count;  ///< in the group
  int each;
  __device__ __forceinline__ LaneChannels(int group_size, int lane) : each(1) {
    while (32 * each < group_size) each *= 2;
    first = lane * each;
    count = min(each, max(0, group_size - first));
  }
};

/// tree() of packing.md. @param y  the lane's terms, zeros behind the last one
template <int kEach>
__device__ __forceinline__ float tree_sum(const float (&y)[kEach]) {
  return across_warp(kvq::tree_sum(y), [](float a, float b) { return __fadd_rn(a, b); });
}

/// Clips a row to its largest magnitude of a rank, 1 being the largest (packing.md, "Clip"). That magnitude is the
/// largest number that `rank` channels reach or exceed; its bits are found one after the other.
template <int kMostDim>
__device__ __forceinline__ void clip_row(float* row, int dim, int rank, int lane) {
  constexpr int kEach = kMostDim / 32;
  unsigned size[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    size[i] = lane + 32 * i < dim ? __float_as_uint(row[lane + 32 * i]) & 0x7FFFFFFFu : 0u;
  unsigned found = 0;
  for (unsigned bit = 1u << 30; bit; bit >>= 1) {
    unsigned count = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) count += size[i] >= (found | bit);
    if (__reduce_add_sync(kAll, count) >= static_cast<unsigned>(rank)) found |= bit;
  }
  const float threshold = __uint_as_float(found);
  for (int c = lane; c < dim; c += 32) row[c] = fminf(fmaxf(row[c], -threshold), threshold);
  __syncwarp();
}

/// A group of uniform codes.
struct UniformGroup {
  int bits, channels;
  bool affine, integer_zero;
  ScaleRule rule;
};
/// Bits of a group's numbers; `second` is the minimum or zero point of affine codes.
struct GroupNumbers {
  unsigned scale = 0, second = 0;
};

/// Quantizes a group, packing.md (a) and (b). All lanes of a warp call it and get the numbers.
/// @param row    [channels]  @param codes [channels]
template <int kMostDim>
__device__ __noinline__ GroupNumbers encode_uniform(const float* row, const UniformGroup& group, NumberType type,
                                                    std::uint8_t* codes, int lane) {
  const LaneChannels own(group.channels, lane);
  const int levels = (1 << group.bits) - 1, half = 1 << (group.bits - 1);
  const float size = static_cast<float>(group.channels);
  constexpr int kEach = kMostDim / 32;
  float x[kEach], y[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = i < own.count ? row[own.first + i] : 0.0f;
  GroupNumbers numbers;
  float step;
  if (group.affine) {
    float low = row[0], high = low;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (i < own.count) low = fminf(low, x[i]), high = fmaxf(high, x[i]);
    low = across_warp(low, [](float a, float b) { return fminf(a, b); });
    high = across_warp(high, [](float a, float b) { return fmaxf(a, b); });
    const float range = fminf(__fsub_rn(high, low), 3.40282347e38f);
    step = stored(__fdiv_rn(range, static_cast<float>(levels)), type, numbers.scale);
    float second = low;  // minimum or zero point
    if (group.integer_zero) second = step == 0.0f ? 0.0f : floorf(__fadd_rn(__fdiv_rn(-low, step), 0.5f));
    second = stored(second, type, numbers.second);
    if (step == 0.0f) numbers.scale = 0;
    if (second == 0.0f) numbers.second = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float quotient = group.integer_zero ? __fadd_rn(floorf(__fadd_rn(__fdiv_rn(x[i], step), 0.5f)), second)
                                                : floorf(__fadd_rn(__fdiv_rn(__fsub_rn(x[i], second), step), 0.5f));
      const int code = static_cast<int>(fminf(fmaxf(quotient, 0.0f), static_cast<float>(levels)));
      if (i < own.count) codes[own.first + i] = static_cast<std::uint8_t>(step == 0.0f ? 0 : code);
    }
    return numbers;
  }
  float energy = 0.0f;
  if (group.rule == ScaleRule::absmax) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) most = fmaxf(most, fabsf(x[i]));
    most = across_warp(most, [](float a, float b) { return fmaxf(a, b); });
    step = stored(__fdiv_rn(__fmul_rn(2.0f, most), static_cast<float>(levels)), type, numbers.scale);
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) y[i] = __fmul_rn(x[i], x[i]);
    energy = tree_sum(y);
    step = stored(__fmul_rn(gaussian_step(group.bits), __fsqrt_rn(__fdiv_rn(energy, size))), type, numbers.scale);
  }
  int squares = 0;  // sum of squared levels
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float quotient = floorf(__fdiv_rn(x[i], step)), edge = static_cast<float>(half);
    const int code = step == 0.0f ? half : static_cast<int>(fminf(fmaxf(quotient, -edge), edge - 1.0f)) + half;
    const int level = 2 * code - levels;
    y[i] = 0.0f;
    if (i < own.count) {
      codes[own.first + i] = static_cast<std::uint8_t>(code);
      squares += level * level;
      y[i] = __fmul_rn(x[i], static_cast<float>(level));
    }
  }
  const float n = static_cast<float>(__reduce_add_sync(kAll, squares));
  if (group.rule == ScaleRule::norm)
    stored(__fsqrt_rn(__fdiv_rn(__fmul_rn(4.0f, energy), n)), type, numbers.scale);
  else if (group.rule == ScaleRule::least_squares)
    stored(__fdiv_rn(__fmul_rn(2.0f, tree_sum(y)), n), type, numbers.scale);
  if (step == 0.0f) numbers.scale = 0;
  return numbers;
}

/// Quantizes a row of code tiles to codes [D] and group parameters (`params`) [G, N]. All lanes of a warp call it.
template <int kMostDim>
__device__ __forceinline__ void encode_row(const float* row, const TileSide& side, bool bfloat, ScaleRule rule,
                                           std::uint8_t* codes, unsigned* params, int lane) {
  const UniformGroup format{side.bits, side.group_size, side.numbers == 2, side.integer_zero, rule};
  for (int group = 0; group < side.groups(); ++group) {
    const int first = group * side.group_size;
    const GroupNumbers numbers =
        encode_uniform<kMostDim>(row + first, format, {side.number_size, bfloat}, codes + first, lane);
    if (lane == 0) {
      params[group * side.numbers] = numbers.scale;
      if (side.numbers == 2) params[group * side.numbers + 1] = numbers.second;
    }
  }
  __syncwarp();
}

/// Whether all channels of a row are finite. All lanes of a warp call it.
__device__ __forceinline__ bool is_finite_row(const float* row, int dim, int lane) {
  bool finite = true;
  for (int c = lane; c < dim; c += 32) finite = finite && is_finite(row[c]);
  return __all_sync(kAll, finite);
}

/// The number of a row that is not finite.
__device__ __forceinline__ unsigned quiet_nan(NumberType type) {
  return type.bytes == 4 ? 0x7FC00000u : type.bfloat ? 0x7FC0u : 0x7E00u;
}

/// Codes and group parameters of a row that is not finite. All lanes of a warp call it.
__device__ __forceinline__ void poison_row(const TileSide& side, bool bfloat, std::uint8_t* codes, unsigned* params,
                                           int lane) {
  for (int c = lane; c < side.head_dim; c += 32) codes[c] = 0;
  for (int i = lane; i < side.groups() * side.numbers; i += 32) params[i] = quiet_nan({side.number_size, bfloat});
  __syncwarp();
}

__device__ __forceinline__ void store_number(std::byte* at, const TileSide& side, unsigned bits) {
  if (side.number_size == 4)
    *reinterpret_cast<unsigned*>(at) = bits;
  else
    *reinterpret_cast<unsigned short*>(at) = static_cast<unsigned short>(bits);
}

/// Stores a quantized row as a token of a tile. All lanes of a warp call it.
__device__ __forceinline__ void store_codes(const std::uint8_t* codes, const unsigned* params, const TileSide& side,
                                            bool value, std::byte* tile, int token, int lane) {
  const int piece_bytes = side.piece_bytes(), count = side.groups() * side.numbers;
  for (int i = lane; i < 4 * piece_bytes; i += 32) {
    const int piece = i / piece_bytes, byte = i % piece_bytes;
    unsigned all = 0;
    for (int i_part = 0; i_part < parts_of_byte(side, byte); ++i_part) {
      const BytePart part = byte_part(side, piece, byte, i_part);
      all |= (static_cast<unsigned>(codes[part.channel]) >> part.first & ((1u << part.width) - 1)) << part.shift;
    }
    tile[value ? value_code_offset(side, token, piece, byte) : key_code_offset(side, token, piece, byte)] =
        static_cast<std::byte>(all);
  }
  for (int i = lane; i < count; i += 32)
    store_number(tile + number_offset(side, token, i / side.numbers, i % side.numbers), side, params[i]);
}

/// Stores a row as bfloat16. @param order  format whose value_place() permutes the channels; exact: no permutation
__device__ __forceinline__ void store_exact(const float* row, int dim, const TileSide& order, std::byte* tile,
                                            int token, int lane) {
  for (int c = lane; c < dim; c += 32)
    *reinterpret_cast<__nv_bfloat16*>(tile + exact_offset(dim, token, value_place(order, c))) = to_bf16(row[c]);
}

__device__ __forceinline__ PageTiles page_tiles(std::byte* pages, std::int64_t page_stride, int page_shift,
                                                const CacheFormat& format, int num_kv_heads, int head, bool value) {
  const PageLayout layout{format.k, format.v, num_kv_heads, 1 << page_shift};
  return {pages, static_cast<unsigned>(page_stride), page_shift,
          value ? layout.value_tile(head, 0) : layout.key_tile(head, 0), format.side(value).bytes()};
}

/// Stores the block's rows that have a destination in pages. All threads of the block call it, behind a barrier after
/// `x` and `page` are written.
/// @param store  (tile_of_row: row of the block -> its tile): quantizes and stores the rows that have a page
template <int kMostDim, typename Store>
__device__ __forceinline__ void store_tiles(GenericRows<kMostDim>& rows, const TileSide& side, const PageTiles& tile_of,
                                            Store store) {
  const int thread = static_cast<int>(threadIdx.x);
  // If the 16 rows fill one tile of a page, the tile is assembled in shared memory and copied at once, unless it is too
  // large: bit tiles may have a number for each channel.
  const std::int64_t first = rows.page[0];
  const bool follows = thread >= kTileTokens || rows.page[thread] == first + thread;
  const bool whole = !__syncthreads_or(!follows || first < 0 || first % kTileTokens != 0 ||
                                       side.bytes() > static_cast<int>(sizeof rows.tile));
  store([&](int i) { return whole ? rows.tile : tile_of(rows.page[i]); });
  __syncthreads();
  if (!whole) return;
  std::byte* to = tile_of(first);
  for (int i = 16 * thread; i < side.bytes(); i += 16 * kThreads)
    *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(rows.tile + i);
  __syncthreads();
}

/// Calls store(row of the block, tile, token) for the rows that have a page; a warp takes a row at a time. All threads
/// of the block call it, as store_tiles().
template <int kMostDim, typename Store>
__device__ __forceinline__ void store_each_row(GenericRows<kMostDim>& rows, const TileSide& side,
                                               const PageTiles& tile_of, Store store) {
  store_tiles(rows, side, tile_of, [&](auto tile_of_row) {
    for (int i = static_cast<int>(threadIdx.x) / 32; i < kTileTokens; i += kWarps) {
      if (rows.page[i] < 0) continue;
      store(i, tile_of_row(i), static_cast<int>(rows.page[i]) % kTileTokens);
      __syncwarp();
    }
  });
}

/// Quantizes a row of code tiles or of an exact side, and stores it. All lanes of a warp call it.
/// @return  the row is finite
template <int kMostDim>
__device__ __forceinline__ bool code_row(GenericRows<kMostDim>& rows, int i, const TileSide& side, bool bfloat,
                                         bool value, ScaleRule rule, int clip_rank, std::byte* tile, int token) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  if (side.exact()) {
    store_exact(rows.x[i], side.head_dim, side, tile, token, lane);
    return true;
  }
  const bool finite = is_finite_row(rows.x[i], side.head_dim, lane);
  if (finite) {
    if (clip_rank > 0) clip_row<kMostDim>(rows.x[i], side.head_dim, clip_rank, lane);
    encode_row<kMostDim>(rows.x[i], side, bfloat, rule, rows.codes[warp], rows.params[warp], lane);
  } else {
    poison_row(side, bfloat, rows.codes[warp], rows.params[warp], lane);
  }
  store_codes(rows.codes[warp], rows.params[warp], side, value, tile, token, lane);
  return finite;
}

}  // namespace kvq::generic
