#pragma once

#include <kvq/plan/kernel_limits.h>
#include <kvq/plan/page_layout.h>
#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/decode/common.cuh>
#include <kvq/runtime/kernels/decode/rotate.cuh>

#include <type_traits>

/// What rows with centroids add to four_rows.cuh. A row is its codes' row plus a centroid, both in the basis of x @ A:
///
///   score of token i    q . k_hat_i = q . codes_i + q . centroid[index_i]
///   result              sum_i p_i v_hat_i = sum_i p_i codes_i + sum_c mass[c] centroid[c],
///                       mass[c] = sum of p_i over the tokens with index c
///
/// So the queries kernel multiplies each query by all centroids once, a token's score takes one look-up, and the masses
/// of a work tile are multiplied by the values' centroids once, at its end. An index that is too large counts as the
/// last one.
namespace kvq::decode {

/// The indices of the tokens g and g + 8 of a tile: bits 0 to 7 and 8 to 15.
template <typename Side>
__device__ __forceinline__ unsigned centroid_indices(const unsigned char* tile, int g) {
  return *reinterpret_cast<const unsigned short*>(tile + index_offset(Side::side(), g));
}

/// The centroids of a KV head in the basis of its rows: [C, D].
__device__ __forceinline__ const float* rotated_centroids(const RowCode& code, int head, int dim) {
  return code.rotated_centroids + std::int64_t{code.per_head ? head : 0} * code.num_centroids * dim;
}

// ---- 1. Keys -----------------------------------------------------------------------------------------------------

/// Writes the scores of four rotated queries with all centroids of their KV head. All threads of the block call it.
/// @param rows  of the work tile
/// @param to    has `exact_score_ratio`
template <typename T>
__device__ __forceinline__ void score_centroids(const RowCode& code, int head, const PaddedRow<T::kHeadDim>* rows,
                                                typename T::Operand& to) {
  static_assert(T::kHeadDim == 128 && T::kHeads == 4);
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const float4* centroids = reinterpret_cast<const float4*>(rotated_centroids(code, head, T::kHeadDim)) + lane;
  float4 queries[T::kHeads];  // four channels of each
#pragma unroll
  for (int row = 0; row < T::kHeads; ++row) queries[row] = reinterpret_cast<const float4*>(rows[row])[lane];
  const float ratio = to.exact_score_ratio[lane & 3];
#pragma unroll 8
  for (int c = warp; c < kMostTunedCentroids; c += kRotateWarps) {
    const float4 x = __ldg(centroids + std::int64_t{min(c, code.num_centroids - 1)} * (T::kHeadDim / 4));
    float products[T::kHeads];
#pragma unroll
    for (int row = 0; row < T::kHeads; ++row) {
      const float4& q = queries[row];
      products[row] = fmaf(q.x, x.x, fmaf(q.y, x.y, fmaf(q.z, x.z, q.w * x.w)));
    }
    // Lanes add up their channels; each gets the sums of one row.
    float half[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float even = products[2 * j], odd = products[2 * j + 1];
      half[j] = (lane & 1 ? odd : even) + __shfl_xor_sync(kAll, lane & 1 ? even : odd, 1);
    }
    float sum = (lane & 2 ? half[1] : half[0]) + __shfl_xor_sync(kAll, lane & 2 ? half[0] : half[1], 2);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
    if (lane < T::kHeads) to.centroid_scores[c][lane] = sum * ratio;
  }
}

/// Adds the scores of centroids to those of a stage's tokens: 2 u and 2 u + 1 are those of tile u's tokens g and g + 8.
template <typename T>
__device__ __forceinline__ void add_centroid_scores(const unsigned char* keys, const typename T::Operand& operand,
                                                    int lane, float (&scores)[2 * T::kStageTiles]) {
#pragma unroll
  for (int u = 0; u < T::kStageTiles; ++u) {
    const unsigned two = centroid_indices<typename T::KSide>(keys + u * T::KSide::side().bytes(), lane >> 2);
    scores[2 * u] += operand.centroid_scores[two & 0xFF][lane & 3];
    scores[2 * u + 1] += operand.centroid_scores[two >> 8][lane & 3];
  }
}

// ---- 2. Values ---------------------------------------------------------------------------------------------------

/// A consumer warp's masses, in shared memory: integers, because shared memory adds integers without a loop. A mass is
/// its integer times the unit 2^-(log_units + reference); the weights are relative to the same reference. When the sum
/// of a row's weights has grown, enlarge_unit() makes the unit about 2^-24 of that sum, so no integer reaches 2^32.
/// Whether a weight is rounded up or down depends on its token's place, so errors of many small weights cancel.
/// Lane 4 g + t has row t.
template <typename T>
struct CentroidMasses {
  static constexpr float kNoUnit = -kMinusInf;
  unsigned (*masses)[T::kHeads];  ///< [kMostTunedCentroids]
  float log_units;                ///< of the unit, see above; kNoUnit: no weight was added yet

  /// Clears the warp's masses. All lanes of a warp call it.
  __device__ __forceinline__ void open(unsigned (*of_warp)[T::kHeads], int lane) {
    masses = of_warp;
    for (int c = lane; c < kMostTunedCentroids; c += 32) *reinterpret_cast<uint4*>(masses[c]) = make_uint4(0, 0, 0, 0);
    __syncwarp();
  }
  __device__ __forceinline__ void reset() { log_units = kNoUnit; }

  /// Makes the unit large enough for sums of a row's weights. All lanes of a warp call it.
  /// @param sum  of this lane's weights, those of the stage to come included
  __device__ __forceinline__ void enlarge_unit(float reference, float sum, int lane) {
    constexpr float kLogSum = 24.0f;  // of a row's sum in units, at most
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
    if (!(sum > 0.0f)) return;
    const float most = kLogSum - ceilf(log2f(sum)) - reference;
    if (!(log_units > most)) return;
    if (log_units < kNoUnit) {
      // Whole bits, so that integers are shifted.
      const float bits = ceilf(log_units - most);
      const unsigned shift = bits < 31.0f ? static_cast<unsigned>(bits) : 31u;
      for (int c = lane >> 2; c < kMostTunedCentroids; c += 8) {
        unsigned& mass = masses[c][lane & 3];
        mass = (mass >> shift) + (mass >> (shift - 1) & 1u);
      }
      log_units -= bits;
    } else {
      log_units = most;
    }
  }

  /// Adds the weights of a stage's tokens.
  /// @param weights  2 u and 2 u + 1: of tile u's tokens g and g + 8; 0 for tokens that are not seen
  /// @param sum      of this lane's weights so far, these included
  __device__ __forceinline__ void add(const unsigned char* values, const float (&weights)[2 * T::kStageTiles],
                                      float reference, float sum, int lane) {
    constexpr float kMostOfLane = 268435456.0f;  // 2^28 units: eight lanes have at most half of 2^32
    const int g = lane >> 2;
    if (__any_sync(kAll, sum * ptx::ex2(log_units + reference) > kMostOfLane)) {
      __syncwarp();  // the other lanes have added their weights of the stages before
      enlarge_unit(reference, sum, lane);
      __syncwarp();
      ptx::keep_branch();
    }
    const float units = log_units < kNoUnit ? ptx::ex2(log_units + reference) : 0.0f;
    // The roundings of a stage's tokens are evenly spaced between 0 and 1.
    constexpr float kStep = 1.0f / (16 * T::kStageTiles);
    const float rounding = static_cast<float>(g) * 0.125f + 0.5f * kStep;
#pragma unroll
    for (int u = 0; u < T::kStageTiles; ++u) {
      const unsigned two = centroid_indices<typename T::VSide>(values + u * T::VSide::side().bytes(), g);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float of_token = static_cast<float>(2 * u + i) * kStep;
        const unsigned mass = __float2uint_rz(fmaf(weights[2 * u + i], units, rounding + of_token));
        atomicAdd(&masses[i ? two >> 8 : two & 0xFF][lane & 3], mass);
      }
    }
  }
};
struct NoMasses {};
template <typename T>
using MassesOf = std::conditional_t<T::kValueCentroids, CentroidMasses<T>, NoMasses>;

/// Adds up the masses of all consumer warps for one row, as weights relative to the row's merged reference, and clears
/// them. All lanes of a warp call it.
/// @param factors  of each consumer warp's integers
/// @param to       [kMostTunedCentroids, kHeads]
template <typename T>
__device__ __forceinline__ void merge_masses(typename T::DecodeShared& shared, int num_centroids, int row,
                                             const float (&factors)[T::kConsumerWarps], int lane, float* to) {
  float behind = 0.0f;  // masses of indices that are too large
#pragma unroll
  for (int i = 0; i < kMostTunedCentroids / 32; ++i) {
    const int c = 32 * i + lane;
    float mass = 0.0f;
#pragma unroll
    for (int w = 0; w < T::kConsumerWarps; ++w) {
      unsigned& of_warp = shared.masses[w][c][row];
      mass = fmaf(static_cast<float>(of_warp), factors[w], mass);
      of_warp = 0;
    }
    if (c >= num_centroids) behind += mass;
    to[c * T::kHeads + row] = mass;
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) behind += __shfl_xor_sync(kAll, behind, step);
  __syncwarp();
  if (lane == 0) to[(num_centroids - 1) * T::kHeads + row] += behind;
}

/// Sums of a channel's centroids, each times its mass, for all rows. @param masses  result of merge_masses()
template <typename T>
__device__ __forceinline__ float4 sum_of_centroids(const RowCode& code, int head, int channel, const float* masses) {
  const float* centroids = rotated_centroids(code, head, T::kHeadDim) + channel;
  float4 sums = make_float4(0, 0, 0, 0);
#pragma unroll 32
  for (int c = 0; c < code.num_centroids; ++c)
    add_scaled(sums, __ldg(centroids + c * T::kHeadDim), reinterpret_cast<const float4*>(masses)[c]);
  return sums;
}

}  // namespace kvq::decode
