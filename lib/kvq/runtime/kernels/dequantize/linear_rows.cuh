#pragma once

#include <kvq/runtime/kernels/common/format.h>
#include <kvq/runtime/kernels/dequantize/linear_layout.h>
#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/common/constants.cuh>
#include <kvq/runtime/kernels/common/pair.cuh>
#include <kvq/runtime/kernels/dequantize/destinations.cuh>
#include <kvq/runtime/kernels/dequantize/page_tile.cuh>

/// Dequantizes linear rows of one scale: x = s M b + center with bits b of +1/2 and -1/2. M [D, B] of the head has all
/// that its rotation does in it (LinearRowsLayout). The other operand of the product is bits: signs of fp16 numbers. So
/// only M is rounded, to fp16; a row's scale is applied behind the product, in float. Rows of exact windows are
/// multiplied by the other part of the matrix, A^-1.
///
/// A block takes 64 columns of one head and side and keeps the matrix in shared memory; its warps take tokens, 32 at a
/// time. The words of a row are a loop, so one kernel takes rows of all sizes.
///
///   lane 4 g + t    tokens g and g + 8 of 16    channels 32 j + 8 t + e, e = 0..7
namespace kvq::dequantize {

template <int kDim, typename ActivationArg>
struct LinearRowsTraits {
  using Activation = ActivationArg;
  static constexpr int kHeadDim = kDim, kColumns = LinearRowsLayout::kColumns, kColumnBlocks = kHeadDim / kColumns;
  static_assert(kHeadDim % kColumns == 0);
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kMinBlocks = 4;
  static constexpr int kTiles = 2;  ///< tiles of 16 tokens that a warp takes at once
  static constexpr int kTokens = kTiles * kTileTokens;
  KVQ_HD static constexpr LinearRowsLayout layout(int row_words) { return {kHeadDim, row_words}; }
  /// The matrix, then the center.
  KVQ_HD static constexpr int shared_bytes(int row_words) { return layout(row_words).block_bytes() + kColumns * 4; }
};

/// Sums of the products with a block's columns: [tile][product of eight columns].
template <int kTiles>
using LinearSums = float[kTiles][8][4];

/// c += the operand `a` [tile][step] times the rows of one turn. @param matrix  of the turn
template <int kTiles>
__device__ __forceinline__ void multiply_turn(const uint4* matrix, const unsigned (&a)[kTiles][2][4], int lane,
                                              LinearSums<kTiles>& c) {
#pragma unroll
  for (int step = 0; step < 2; ++step)
#pragma unroll
    for (int two = 0; two < 4; ++two) {  // products
      const uint4 b = matrix[(step * 4 + two) * 32 + lane];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const unsigned(&x)[4] = a[tile][step];
        ptx::mma_m16n8k16_fp16(c[tile][2 * two], x[0], x[1], x[2], x[3], b.x, b.y);
        ptx::mma_m16n8k16_fp16(c[tile][2 * two + 1], x[0], x[1], x[2], x[3], b.z, b.w);
      }
    }
}

/// What a lane loads of a tile for run `run`: that is four turns, of the rest behind the chunks two turns, then one.
template <bool kValue>
__device__ __forceinline__ uint2 load_run(const std::byte* tile, int row_words, int run, int lane) {
  const int runs = row_words / 4, rest = row_words % 4, g = lane / 4, t = lane % 4;
  if (run < runs) {  // both halves of a chunk of eight words, then the chunk of four words
    const int at = run < runs / 2 * 2 ? run / 2 * 512 + lane * 16 + run % 2 * 8 : run * 256 + lane * 8;
    return __ldg(reinterpret_cast<const uint2*>(tile + at));
  }
  tile += runs * 256;
  const bool is_single = run > runs || rest == 1;
  if constexpr (kValue) {  // bytes of the tokens g and g + 8
    const auto* bytes = reinterpret_cast<const unsigned short*>(tile) + g;
    if (is_single) return make_uint2(__ldg(bytes + ((rest - 1) * 4 + t) * 8), 0);
    return make_uint2(__ldg(bytes + t * 8), __ldg(bytes + (t + 4) * 8));
  } else {
    return __ldg(reinterpret_cast<const uint2*>(tile) + g * rest + (is_single ? rest - 1 : t % 2));
  }
}

/// Makes of it the lane's words of the tokens g and g + 8 (LinearRowsLayout::row_bit()). All lanes of a warp call it.
template <bool kValue>
__device__ __forceinline__ uint2 words_of_run(uint2 loaded, int row_words, int run, int lane) {
  const int runs = row_words / 4, t = lane % 4;
  const bool is_chunk = run<runs, is_single = run> runs || row_words % 4 == 1;
  if constexpr (kValue) {
    if (is_chunk) {
      // A byte of the tokens 2 t, 2 t + 8, 2 t + 1, 2 t + 9 becomes the bytes 2 t and 2 t + 1 of the tokens g, g + 8.
      const unsigned low = ptx::movmatrix_trans(loaded.x), high = ptx::movmatrix_trans(loaded.y);
      return make_uint2(__byte_perm(low, high, 0x6420), __byte_perm(low, high, 0x7531));
    }
    if (!is_single) return make_uint2(__byte_perm(loaded.x, loaded.y, 0x4400), __byte_perm(loaded.x, loaded.y, 0x5511));
    const unsigned first = loaded.x & 0xFF, second = loaded.x >> 8;
    return make_uint2(first << 12 | first << 24, second << 12 | second << 24);
  } else {
    const int shift = is_chunk ? 0 : is_single ? 4 * t : t / 2 * 8;
    return make_uint2(loaded.x << shift, loaded.y << shift);
  }
}

/// c += bits of tiles times their part of the matrix.
/// @param tiles  null: nothing is read
/// @param half   of the rows g and g + 8: minus one half in fp16, twice, or 0 for a row without bits
template <bool kValue, int kTiles>
__device__ __forceinline__ void multiply_bits(const uint4* matrix, const std::byte* const (&tiles)[kTiles],
                                              int row_words, const unsigned (&half)[2], int lane,
                                              LinearSums<kTiles>& c) {
  const auto load = [&](int run, uint2(&to)[kTiles]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      to[tile] = tiles[tile] ? load_run<kValue>(tiles[tile], row_words, run, lane) : make_uint2(0, 0);
  };
  uint2 loaded[kTiles];
  load(0, loaded);
#pragma unroll 1
  for (int run = 0, turn = 0; turn < row_words; ++run) {
    uint2 words[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) words[tile] = words_of_run<kValue>(loaded[tile], row_words, run, lane);
    const int left = row_words - turn, next = turn + (left >= 4 ? 4 : left >= 2 ? 2 : 1);
    if (next < row_words) load(run + 1, loaded);
#pragma unroll 1
    for (; turn < next; ++turn, matrix += LinearRowsLayout::kTurnBytes / 16) {
      unsigned a[kTiles][2][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          unsigned& word = r ? words[tile].y : words[tile].x;
#pragma unroll
          for (int n = 0; n < 4; ++n)  // a bit of 1 makes the number positive
            a[tile][n / 2][n % 2 * 2 + r] = (word << n & 0x80008000u) ^ half[r];
          word <<= 4;
        }
      multiply_turn(matrix, a, lane, c);
    }
  }
}

/// c += exact (bfloat16) rows times their part of the matrix, once a power of two is divided out of each row.
/// @param rows       tiles that have the rows of tokens g and g + 8, or null: a row of zeros
/// @param row_scale  result: those powers of two, where there are rows
template <typename T>
__device__ __forceinline__ void multiply_exact(const uint4* matrix, const std::byte* const (&rows)[2],
                                               const int (&token)[2], int lane, LinearSums<1>& c,
                                               float (&row_scale)[2]) {
  constexpr int kTurns = T::kHeadDim / 32;
  using Two = Pair<__nv_bfloat16>;
  const auto load = [&](int turn, int r) {
    if (!rows[r]) return make_uint4(0, 0, 0, 0);
    return __ldg(reinterpret_cast<const uint4*>(
        rows[r] + exact_offset(T::kHeadDim, token[r], LinearRowsLayout::row_channel(turn, 0, lane % 4 * 2))));
  };
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = 0.0f;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      const uint4 eight = load(turn, r);
      const unsigned twos[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 x = Two::to_float(twos[n]);
        most = fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y)));
      }
    }
    most = fmaxf(most, __shfl_xor_sync(kAll, most, 1));
    most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
    // The largest magnitude becomes 2^14 to 2^15, as in fragments.cuh.
    const int exponent = max(static_cast<int>(__float_as_uint(most) >> 23) - 127 - 14, -100);
    inverse[r] = __uint_as_float(static_cast<unsigned>(127 - exponent) << 23);
    if (rows[r]) row_scale[r] = __uint_as_float(static_cast<unsigned>(127 + exponent) << 23);
  }
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn, matrix += LinearRowsLayout::kTurnBytes / 16) {
    unsigned a[1][2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 eight = load(turn, r);
      const unsigned twos[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 x = Two::to_float(twos[n]);
        a[0][n / 2][n % 2 * 2 + r] = Pair<__half>::pack(x.x * inverse[r], x.y * inverse[r]);
      }
    }
    multiply_turn(matrix, a, lane, c);
  }
}

/// The scales of a tile's tokens g and g + 8.
__device__ __forceinline__ float2 load_row_scales(const std::byte* tile, const TileSide& side, bool bfloat, int g) {
  const std::byte* at = tile + number_offset(side, g, 0, 0);
  if (side.number_size == 4) return __ldg(reinterpret_cast<const float2*>(at));
  const unsigned two = __ldg(reinterpret_cast<const unsigned*>(at));
  return bfloat ? Pair<__nv_bfloat16>::to_float(two) : Pair<__half>::to_float(two);
}

/// 32 columns of a tile's sums as rows, with scales, factors and the center. @param rows  [token g, g + 8]
/// @param factors  of each row: those of its part of the matrix
template <typename T>
__device__ __forceinline__ void finish_rows(const float (&c)[8][4], int four, const float (&scale)[2],
                                            const float* const (&factors)[2], const float* center, int lane,
                                            uint4 (&rows)[2]) {
  using Two = Pair<typename T::Activation>;
  const int column = 32 * four + lane % 4 * 8;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    unsigned twos[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 f = *reinterpret_cast<const float4*>(factors[r] + column + 4 * half),
                   o = *reinterpret_cast<const float4*>(center + column + 4 * half);
      const float(&x)[4] = c[4 * four + 2 * half], (&y)[4] = c[4 * four + 2 * half + 1];
      twos[2 * half] =
          Two::pack_saturated(fmaf(x[2 * r] * scale[r], f.x, o.x), fmaf(x[2 * r + 1] * scale[r], f.y, o.y));
      twos[2 * half + 1] =
          Two::pack_saturated(fmaf(y[2 * r] * scale[r], f.z, o.z), fmaf(y[2 * r + 1] * scale[r], f.w, o.w));
    }
    rows[r] = make_uint4(twos[0], twos[1], twos[2], twos[3]);
  }
}

/// Dequantizes one side of one head; `workers` blocks share the tokens, this block is number `worker`.
template <typename T, bool kValue, typename Destination>
__device__ __forceinline__ void dequantize_linear_side(unsigned char* shared, const Destination& destination,
                                                       const CacheFormat& format, int head, int first_column,
                                                       int worker, int workers) {
  constexpr unsigned kMinusHalves = 0xB800B800u;
  const PagedCacheView& cache = destination.cache();
  const TileSide& side = format.side(kValue);
  const PageLayout pages{format.k, format.v, cache.num_kv_heads, 1 << cache.page_shift};
  const LinearRowsLayout layout = T::layout(side.row_words);
  const int lane = static_cast<int>(threadIdx.x) % 32;

  const DeviceRotation& rotation = kValue ? cache.rotation_v : cache.rotation_k;
  const std::byte* from = rotation.row_matrices + std::int64_t{rotation.per_head ? head : 0} * layout.bytes() +
                          first_column / T::kColumns * layout.block_bytes();
  for (int i = static_cast<int>(threadIdx.x) * 16; i < layout.block_bytes(); i += T::kThreads * 16)
    ptx::cp_async_16(ptx::shared_address(shared + i), from + i);
  auto* center = reinterpret_cast<float*>(shared + layout.block_bytes());
  const float* centers = kValue ? cache.center_v : cache.center_k;
  for (int i = static_cast<int>(threadIdx.x); i < T::kColumns; i += T::kThreads)
    center[i] = centers ? centers[head * T::kHeadDim + first_column + i] : 0.0f;
  ptx::cp_async_wait_all();
  __syncthreads();
  const auto* matrix = reinterpret_cast<const uint4*>(shared);
  const auto* of_bits = reinterpret_cast<const float*>(shared + layout.factor_offset(0, 0));
  const auto* of_channels = reinterpret_cast<const float*>(shared + layout.factor_offset(1, 0));

  const auto whole = [&](const auto& output, int sequence, int first) {
    const std::byte* tiles[T::kTiles];
    float scale[T::kTiles][2];
#pragma unroll
    for (int tile = 0; tile < T::kTiles; ++tile) {
      tiles[tile] = page_tile(cache, pages, sequence, head, kValue, first + tile * kTileTokens);
      const float2 scales =
          tiles[tile] ? load_row_scales(tiles[tile], side, format.bfloat(kValue), lane / 4) : make_float2(kNaN, kNaN);
      scale[tile][0] = scales.x, scale[tile][1] = scales.y;
    }
    LinearSums<T::kTiles> c = {};
    multiply_bits<kValue>(matrix, tiles, side.row_words, {kMinusHalves, kMinusHalves}, lane, c);
#pragma unroll
    for (int four = 0; four < 2; ++four)
#pragma unroll
      for (int tile = 0; tile < T::kTiles; ++tile) {
        uint4 rows[2];
        finish_rows<T>(c[tile], four, scale[tile], {of_bits, of_bits}, center, lane, rows);
#pragma unroll
        for (int r = 0; r < 2; ++r)
          *destination.address(output, first + tile * kTileTokens + lane / 4 + 8 * r,
                               first_column + 32 * four + lane % 4 * 8) = rows[r];
      }
  };
  const auto part = [&](const auto& output, int sequence, int first) {
    const PositionRange coded = output.tokens.coded_from(output.begin);
    const int end = min(first + kTileTokens, output.end);
    if (end <= output.begin) return;
    const std::byte* tiles[1] = {};
    float scale[2] = {};
    LinearSums<1> c = {};
    const bool any_coded = max(first, coded.begin) < min(end, coded.end),
               any_exact = max(first, output.begin) < min(end, output.tokens.sink_end) ||
                           max(first, output.tokens.recent_begin) < end;
    const std::byte* exact[2] = {};
    const float* factors[2] = {of_bits, of_bits};
    int token[2] = {};
    unsigned half[2] = {};
    if (any_coded) {
      tiles[0] = page_tile(cache, pages, sequence, head, kValue, first);
      const float2 scales =
          tiles[0] ? load_row_scales(tiles[0], side, format.bfloat(kValue), lane / 4) : make_float2(kNaN, kNaN);
      scale[0] = scales.x, scale[1] = scales.y;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int position = first + lane / 4 + 8 * r;
      if (coded.contains(position)) {
        half[r] = kMinusHalves;
      } else if (position >= output.begin && position < end) {
        const bool is_sink = position < output.tokens.sink_end;
        exact[r] = exact_tiles(cache, is_sink, sequence, head, position, token[r]) +
                   (kValue ? cache.ring_layout.k.bytes() : 0);
        token[r] %= kTileTokens, factors[r] = of_channels;
      }
    }
    if (any_coded) multiply_bits<kValue>(matrix, tiles, side.row_words, half, lane, c);
    if (any_exact)
      multiply_exact<T>(matrix + side.row_words * (LinearRowsLayout::kTurnBytes / 16), exact, token, lane, c, scale);
#pragma unroll
    for (int four = 0; four < 2; ++four) {
      uint4 rows[2];
      finish_rows<T>(c[0], four, scale, factors, center, lane, rows);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int position = first + lane / 4 + 8 * r;
        if (position >= output.begin && position < output.end)
          *destination.address(output, position, first_column + 32 * four + lane % 4 * 8) = rows[r];
      }
    }
  };
  for_warp_tiles<T, false>(destination, kValue, head, first_column, worker, workers, whole, part);
}

/// The sides that a launch dequantizes, the last dimension of its grid.
struct LaunchedSides {
  bool keys = true, values = true;
  KVQ_HD constexpr int count() const { return keys + values; }
  KVQ_HD constexpr bool is_value(int z, int heads) const { return !keys || z >= heads; }
};

/// Grid [workers, kColumnBlocks, sides * Hkv]: keys of all heads, then values.
template <typename T, typename Destination>
__global__ void __launch_bounds__(T::kThreads, T::kMinBlocks)
    linear_dequantize_kernel(const __grid_constant__ Destination destination,
                             const __grid_constant__ CacheFormat format, LaunchedSides sides) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int heads = destination.cache().num_kv_heads, z = static_cast<int>(blockIdx.z), head = z % heads;
  const int first_column = static_cast<int>(blockIdx.y) * T::kColumns;
  const int worker = static_cast<int>(blockIdx.x), workers = static_cast<int>(gridDim.x);
  if (sides.is_value(z, heads))
    dequantize_linear_side<T, true>(memory, destination, format, head, first_column, worker, workers);
  else
    dequantize_linear_side<T, false>(memory, destination, format, head, first_column, worker, workers);
}

}  // namespace kvq::dequantize
