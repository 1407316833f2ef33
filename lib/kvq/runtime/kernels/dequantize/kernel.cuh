#pragma once

#include <kvq/runtime/kernels/common/pair.cuh>
#include <kvq/runtime/kernels/dequantize/destinations.cuh>
#include <kvq/runtime/kernels/dequantize/fragments.cuh>

#include <type_traits>

/// Dequantizes cached rows to 16-bit numbers and undoes the rotation, which is one product with a matrix [D, D]: that
/// of a dense rotation, the +1, -1 of a Hadamard transform, or the identity if rows are not rotated. The other operand
/// is codes (fragments.cuh), small integers, so only the matrix is rounded, to fp16. The error is a quarter of the
/// error of rounding the result to bfloat16, and zero without a dense rotation.
///
///   x = sum over groups of  scale (codes . matrix) + minimum (sum of the matrix's rows)     times sign, plus center,
///                                                                                           plus the row's centroid
///
/// A block takes one head and side and keeps the matrix in shared memory, as the tensor cores' operand; its warps take
/// tokens, 16 or 32 at a time. Columns are ordered so that a lane gets eight neighboring channels of a row: 16 bytes.
///
///   lane 4 g + t    tokens g and g + 8 of 16    channels 32 j + 8 t + e, e = 0..7
namespace kvq::dequantize {

/// c += the operand `a` times 32 columns of the matrix, for the steps of one group.
/// @param c  [tile][product of eight columns]
template <typename T, typename Side, int kTiles>
__device__ __forceinline__ void multiply_group(const typename T::Shared& shared,
                                               const unsigned (&a)[kTiles][Steps<Side>::kCount][4], bool value,
                                               int group, int four, int lane, float (&c)[kTiles][4][4]) {
#pragma unroll
  for (int step = 0; step < Steps<Side>::kCount; ++step) {
    // Keys and values assign steps to groups differently; the condition is known at compile time for both.
    if (Steps<Side>::group(value, step) != group) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 b = *reinterpret_cast<const uint4*>(shared.matrix[step][four][half][lane]);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const unsigned(&x)[4] = a[tile][step];
        ptx::mma_m16n8k16_fp16(c[tile][2 * half], x[0], x[1], x[2], x[3], b.x, b.y);
        ptx::mma_m16n8k16_fp16(c[tile][2 * half + 1], x[0], x[1], x[2], x[3], b.z, b.w);
      }
    }
  }
}

/// Prepares the matrix, factors and center in shared memory. All threads call it; it ends with a barrier.
template <typename T, typename Side>
__device__ __forceinline__ void prepare(typename T::Shared& shared, const PagedCacheView& cache, bool value, int head,
                                        int first_column) {
  constexpr int kDim = T::kHeadDim;
  const DeviceRotation& rotation = value ? cache.rotation_v : cache.rotation_k;
  const float* center = value ? cache.center_v : cache.center_k;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int entry = rotation.per_head ? head : 0, order = rotation.matrix ? 1 : max(1, rotation.order);
  const float* matrix = rotation.matrix ? rotation.matrix + static_cast<std::int64_t>(entry) * kDim * kDim : nullptr;
  const auto element = [&](int from, int to) {
    if (matrix) return __ldg(matrix + (value ? from * kDim + to : to * kDim + from));  // A^-T of keys, A^-1 of values
    const int inside = order - 1;
    const float sign = __popc(from & to & inside) & 1 ? -1.0f : 1.0f;
    return (from ^ to) & ~inside ? 0.0f : sign;
  };

  // Each column is divided by its size, a power of two, because the range of fp16 is small.
  const float* sizes = matrix && rotation.sizes ? rotation.sizes + entry * kDim : nullptr;

  // Each thread fills the same word (of four) of the same lane in all operands.
  static_assert(T::kThreads == 128);
  const int word = thread % 4, place = thread / 4;
  for (int step = 0; step < kDim / 16; ++step) {
    const int row = place % 4 * 2 + word % 2 * 8, from = Steps<Side>::channel(value, step, row),
              next = Steps<Side>::channel(value, step, row + 1);
#pragma unroll
    for (int i = 0; i < T::kFours * 2; ++i) {
      const int four = i / 2, half = i % 2, column = place / 4, product = 2 * half + word / 2;
      const int to = first_column + 32 * four + column / 2 * 8 + product * 2 + column % 2;
      // 1 / power of two, from the bits of the float.
      const float inverse = sizes ? __uint_as_float(0x7F000000u - __float_as_uint(__ldg(sizes + to))) : 1.0f;
      const __half2 two = __floats2half2_rn(element(from, to) * inverse, element(next, to) * inverse);
      shared.matrix[step][four][half][place][word] = *reinterpret_cast<const unsigned*>(&two);
    }
  }
  for (int i = thread; i < T::kColumns; i += T::kThreads) {
    const int to = first_column + i;
    float factor = 1.0f;
    if (sizes)
      factor = sizes[to];
    else if (!matrix && rotation.factors)
      factor = rotation.factors[entry * kDim + to];
    else if (!matrix && rotation.signs)
      factor = static_cast<float>(rotation.signs[entry * kDim + to]);
    shared.factor[i] = factor * rsqrtf(static_cast<float>(order));
    shared.center[i] = center ? center[head * kDim + to] : 0.0f;
  }
  __syncthreads();

  // Sums of the matrix's rows: the product with ones.
  unsigned ones[1][Steps<Side>::kCount][4];
#pragma unroll
  for (int step = 0; step < Steps<Side>::kCount; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) ones[0][step][i] = 0x3C003C00u;
  for (int four = warp; four < T::kFours; four += T::kWarps)
#pragma unroll
    for (int group = 0; group < Steps<Side>::kGroups; ++group) {
      float c[1][4][4] = {};
      multiply_group<T, Side>(shared, ones, value, group, four, lane, c);
      if (lane < 4)
#pragma unroll
        for (int e = 0; e < 8; ++e) shared.sums[group][32 * four + 8 * lane + e] = c[0][e / 2][e % 2];
    }
  __syncthreads();
}

/// The rows of `f` times 32 columns of the matrix. @param rows  [tile][token g, g + 8]
/// @param centroids  of the head, from the block's first column on
template <typename T, typename Side, int kTiles>
__device__ __forceinline__ void multiply(const typename T::Shared& shared, const Fragments<Side, kTiles>& f, bool value,
                                         const float* centroids, int four, int lane, uint4 (&rows)[kTiles][2]) {
  constexpr int kGroups = Steps<Side>::kGroups;
  const int t = lane % 4;
  float x[kTiles][2][8] = {};
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float c[kTiles][4][4] = {};
    multiply_group<T, Side>(shared, f.a, value, group, four, lane, c);
    const float4* sums = reinterpret_cast<const float4*>(shared.sums[group] + 32 * four + 8 * t);
    const float4 low = sums[0], high = sums[1];
    const float sum[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int e = 0; e < 8; ++e)
          x[tile][r][e] = fmaf(f.scale[tile][r][group], c[tile][e / 2][2 * r + e % 2],
                               fmaf(f.minimum[tile][r][group], sum[e], x[tile][r][e]));
  }
  const float4* factors = reinterpret_cast<const float4*>(shared.factor + 32 * four + 8 * t);
  const float4* centers = reinterpret_cast<const float4*>(shared.center + 32 * four + 8 * t);
  const float4 f0 = factors[0], f1 = factors[1], c0 = centers[0], c1 = centers[1];
  using Two = Pair<typename T::Activation>;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float(&y)[8] = x[tile][r];
      float4 o0 = c0, o1 = c1;
      if constexpr (Side::kIndexBytes > 0) {
        if (const int index = f.centroid[tile][r]; index >= 0) {
          const auto* at = reinterpret_cast<const float4*>(centroids + index * T::kHeadDim + 32 * four + 8 * t);
          const float4 low = __ldg(at), high = __ldg(at + 1);
          o0.x += low.x, o0.y += low.y, o0.z += low.z, o0.w += low.w;
          o1.x += high.x, o1.y += high.y, o1.z += high.z, o1.w += high.w;
        }
      }
      rows[tile][r] = make_uint4(Two::pack_saturated(fmaf(y[0], f0.x, o0.x), fmaf(y[1], f0.y, o0.y)),
                                 Two::pack_saturated(fmaf(y[2], f0.z, o0.z), fmaf(y[3], f0.w, o0.w)),
                                 Two::pack_saturated(fmaf(y[4], f1.x, o1.x), fmaf(y[5], f1.y, o1.y)),
                                 Two::pack_saturated(fmaf(y[6], f1.z, o1.z), fmaf(y[7], f1.w, o1.w)));
    }
}

/// Dequantizes one side of one head; `workers` blocks share the tokens, this block is number `worker`.
template <typename T, typename Side, typename Destination>
__device__ __forceinline__ void dequantize_side(typename T::Shared& shared, const Destination& destination, bool value,
                                                int head, int first_column, int worker, int workers) {
  const PagedCacheView& cache = destination.cache();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  prepare<T, Side>(shared, cache, value, head, first_column);
  [[maybe_unused]] const RowCode& code = value ? cache.code_v : cache.code_k;
  const float* centroids = nullptr;
  if constexpr (Side::kIndexBytes > 0)
    centroids =
        code.centroids + std::int64_t{code.per_head ? head : 0} * code.num_centroids * T::kHeadDim + first_column;
  // The common case: all tokens of the warp tile are coded.
  const auto whole = [&](const auto& output, int sequence, int first) {
    Fragments<Side, T::kTiles> f;
#pragma unroll
    for (int tile = 0; tile < T::kTiles; ++tile) {
      const std::byte* page = page_tile(cache, page_layout<typename T::KSide, typename T::VSide>(cache), sequence, head,
                                        value, first + tile * kTileTokens);
      if (page) {
        read_coded<Side>(page, value, lane, f, tile);
        for (int r = 0; r < 2; ++r) read_index(code, page, r, lane, f, tile);
      } else {
        fill_tile(f, tile, kNaN);
      }
    }
#pragma unroll 1
    for (int four = 0; four < T::kFours; ++four) {
      uint4 rows[T::kTiles][2];
      multiply<T, Side>(shared, f, value, centroids, four, lane, rows);
#pragma unroll
      for (int tile = 0; tile < T::kTiles; ++tile)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          *destination.address(output, first + tile * kTileTokens + lane / 4 + 8 * r,
                               first_column + 32 * four + lane % 4 * 8) = rows[tile][r];
    }
  };
  const auto part = [&](const auto& output, int sequence, int first) {
    Fragments<Side, 1> f;
    read_mixed<typename T::KSide, typename T::VSide>(cache, output.tokens, sequence, head, value, first, output.begin,
                                                     output.end, lane, f);
#pragma unroll 1
    for (int four = 0; four < T::kFours; ++four) {
      uint4 rows[1][2];
      multiply<T, Side>(shared, f, value, centroids, four, lane, rows);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int position = first + lane / 4 + 8 * r;
        if (position >= output.begin && position < output.end)
          *destination.address(output, position, first_column + 32 * four + lane % 4 * 8) = rows[0][r];
      }
    }
  };
  for_warp_tiles<T, Side::kExact>(destination, value, head, first_column, worker, workers, whole, part);
}

/// Grid [workers, kColumnBlocks, 2 Hkv]: keys of all heads, then values.
template <typename T, typename Destination>
__global__ void __launch_bounds__(T::kThreads, T::kMinBlocks)
    dequantize_kernel(const __grid_constant__ Destination destination) {
  extern __shared__ __align__(16) unsigned char memory[];
  typename T::Shared& shared = *reinterpret_cast<typename T::Shared*>(memory);
  const int heads = destination.cache().num_kv_heads;
  const bool value = static_cast<int>(blockIdx.z) >= heads;
  const int head = static_cast<int>(blockIdx.z) - (value ? heads : 0);
  const int first_column = static_cast<int>(blockIdx.y) * T::kColumns;
  const int worker = static_cast<int>(blockIdx.x), workers = static_cast<int>(gridDim.x);
  if (value)
    dequantize_side<T, typename T::VSide>(shared, destination, true, head, first_column, worker, workers);
  else
    dequantize_side<T, typename T::KSide>(shared, destination, false, head, first_column, worker, workers);
}

}  // namespace kvq::dequantize
