#pragma once

#include <kvq/runtime/kernels/quantize_write/params.h>
#include <kvq/runtime/kernels/common/centroids.cuh>

#include <type_traits>

/// The nearest centroid of each row. Of all centroids c of a head, the one with the largest score x c - |c|^2 / 2 is
/// the nearest. Tensor cores compute scores from the 16-bit rows and from centroids that are split in two 16-bit
/// numbers, their high and low part, so a score is off by a known bound. Where one centroid is ahead by more than the
/// bound, it is the nearest by the sums of packing.md, too. Else a warp computes these sums, of the centroids that are
/// not behind by more, and the sums decide.
///
/// A block takes 128 rows, 16 of each warp, and centroids go through shared memory in chunks of 64. For few tokens a
/// block takes 16 rows, of which each warp scores an eighth of the centroids.
namespace kvq::write {

constexpr int kNearestWarps = 8, kNearestThreads = 32 * kNearestWarps;
constexpr int kChunkCentroids = 8 * kNearestWarps;

/// Centroids of one head in shared memory.
template <int kDim>
struct CentroidChunk {
  static constexpr int kPad = 4;  ///< so that two centroids' parts lie in different banks
  /// Of each centroid, the high parts of four neighboring channels, then their low parts: the operands of a lane. In
  /// the order of a lane's products: channels 32 j + 8 t + 4 half are the part (2 j + half) * 4 + t.
  uint4 parts[kChunkCentroids][kDim / 4 + kPad];
};

/// What a lane keeps of a row's scores: the best one with its centroid, and the second best.
struct BestScores {
  float best = kMinusInf, second = kMinusInf;
  int index = 0;
  /// A score that is NaN makes the best one the second best, too.
  __device__ __forceinline__ void add(float score, int centroid) {
    second = fmaxf(second, fminf(score, best));
    if (score > best) best = score, index = centroid;
  }
};

/// The BestScores of a block's rows. For each row there are eight of each warp that scored it: two of each lane.
struct BlockScores {
  static constexpr int kEntries = kNearestWarps * 8 * kTileTokens;
  float best[kEntries], second[kEntries];
  int index[kEntries];
};

/// Four channels of a centroid as operands: the high parts, then the low parts.
template <typename T>
__device__ __forceinline__ uint4 split(float4 c) {
  const unsigned high_01 = Pair<T>::pack(c.x, c.y), high_23 = Pair<T>::pack(c.z, c.w);
  const float2 h01 = Pair<T>::to_float(high_01), h23 = Pair<T>::to_float(high_23);
  return make_uint4(high_01, high_23, Pair<T>::pack(c.x - h01.x, c.y - h01.y), Pair<T>::pack(c.z - h23.x, c.w - h23.y));
}
__device__ __forceinline__ float square_of(float4 c) { return c.x * c.x + c.y * c.y + (c.z * c.z + c.w * c.w); }

/// Adds the products of 16 rows and 8 centroids.
/// @param raw       lane 4 g + t has, of the rows g and g + 8, the channels 32 j + 8 t .. 32 j + 8 t + 7
/// @param parts_of  (j, half): of centroid g, the split channels 32 j + 8 t + 4 half and the next three
template <typename T, int kSteps, typename PartsOf>
__device__ __forceinline__ void add_products(float (&c)[4], const uint4 (&raw)[2][kSteps], PartsOf parts_of) {
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const uint4 &low = raw[0][j], &high = raw[1][j], even = parts_of(j, 0), odd = parts_of(j, 1);
    Pair<T>::mma(c, low.x, high.x, low.y, high.y, even.x, even.y);
    Pair<T>::mma(c, low.x, high.x, low.y, high.y, even.z, even.w);
    Pair<T>::mma(c, low.z, high.z, low.w, high.w, odd.x, odd.y);
    Pair<T>::mma(c, low.z, high.z, low.w, high.w, odd.z, odd.w);
  }
}

/// Loads centroids of a head, splits them and adds half of their squared lengths to `half_norms`. Centroids behind the
/// last one get an infinite length. All threads of the block call it.
/// @param first  number of the first centroid
template <typename T, int kDim>
__device__ __forceinline__ void load_chunk(const RowCode& code, int head, int first, bool is_first_head,
                                           CentroidChunk<kDim>& chunk, float* half_norms) {
  constexpr int kQuads = kDim / 4, kEach = 32 / (kQuads < 32 ? kQuads : 32);  // centroids of a warp at a time
  static_assert(kQuads <= 32);
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int quad = lane % kQuads, part = (quad / 8 * 2 + quad % 2) * 4 + quad / 2 % 4;
#pragma unroll
  for (int i = 0; i < 8 / kEach; ++i) {
    const int own = (warp * (8 / kEach) + i) * kEach + lane / kQuads;
    const bool is_there = first + own < code.num_centroids;
    float4 c = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (is_there)
      c = __ldg(reinterpret_cast<const float4*>(generic::centroid_channel(code, head, first + own, kDim, 4 * quad)));
    chunk.parts[own][part] = split<T>(c);
    float square = square_of(c);
#pragma unroll
    for (int step = 1; step < kQuads; step *= 2) square += __shfl_xor_sync(kAll, square, step);
    if (quad == 0) {
      const float half = is_there ? 0.5f * square : -kMinusInf;
      half_norms[own] = is_first_head ? half : half_norms[own] + half;
    }
  }
}

/// How far the score of the nearest centroid may be behind the best one. With X and C the lengths of the row and of the
/// longest centroid: scores are off by the low parts' rounding, by sums of tensor cores and by the rounding of |c|^2;
/// packing.md's sum of squares, at most (X + C)^2, by its own rounding. NaN or infinite if parts or sums may be.
/// @param channels  of a row; of all heads if their centroids are chosen jointly
template <typename T>
__device__ __forceinline__ float score_bound(float row_square, float centroid_square, int channels) {
  const float row = sqrtf(row_square), centroid = sqrtf(centroid_square), both = (row + centroid) * (row + centroid);
  if (std::is_same_v<T, __half> && !(centroid < 6e4f)) return __uint_as_float(0x7FC00000u);  // infinite parts
  const float parts = static_cast<float>((channels + 127) / 128), eps = 5.9604645e-8f;       // 2^-24
  float bound =
      256.0f * eps * parts * row * centroid + 32.0f * eps * centroid_square + (18.0f + 2.0f * parts) * eps * both;
  if (std::is_same_v<T, __half>) bound += 64.0f * eps * parts * row;  // low parts below the normal range
  return bound + 1e-30f;
}

/// The score from which on a centroid may be the nearest of a row, and the only such centroid or -1. NaN: any may be.
/// @param entry  of the row's first BestScores; they are `stride` apart
struct Verdict {
  float least;
  int index;
};
__device__ __forceinline__ Verdict judge(const BlockScores& scores, int entry, int count, int stride, float bound) {
  float best = kMinusInf;
  for (int i = 0; i < count; ++i) best = fmaxf(best, scores.best[entry + i * stride]);
  const float least = best - bound;
  int found = 0, index = -1;
  for (int i = 0; i < count; ++i) {
    const int at = entry + i * stride;
    if (!(scores.best[at] < least)) ++found, index = scores.index[at];
    if (!(scores.second[at] < least)) found += 2;
  }
  return {least, found == 1 ? index : -1};
}

/// The centroid of the smallest sum of packing.md among those that are added. All lanes of a warp call it. Sums of four
/// centroids are computed at once, because each waits for loads and for other lanes.
/// @tparam RowOf  head -> the row's channels
template <int kDim, typename RowOf>
class NearestOf {
 public:
  /// @param heads  of the centroids, from `first_head` on
  __device__ __forceinline__ NearestOf(const RowCode& code, int first_head, int end_head, RowOf row_of, int lane)
      : code_(code), first_head_(first_head), end_head_(end_head), row_of_(row_of), lane_(lane) {}
  __device__ __forceinline__ void add(int centroid) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (i == count_) pending_[i] = centroid;
    if (++count_ == kAtOnce) compare();
  }
  /// Of equal sums the first centroid. 0 if all sums are infinite or NaN, as those of rows that are not finite are.
  __device__ __forceinline__ int result() {
    compare();
    return index_;
  }

 private:
  static constexpr int kAtOnce = 4, kEach = kDim / 32;
  static_assert(kEach == 2 || kEach == 4, "powers of two, see tree() of packing.md");

  __device__ __forceinline__ void compare() {
    generic::SumOfSegments sums[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sums[i] = generic::SumOfSegments{};
    for (int head = first_head_; head < end_head_; ++head) {
      const auto* x = row_of_(head) + lane_ * kEach;
      float sum[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float* c = generic::centroid_channel(code_, head, pending_[i], kDim, lane_ * kEach);
        float y[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          const float difference = __fsub_rn(to_float(x[e]), __ldg(c + e));
          y[e] = __fmul_rn(difference, difference);
        }
        sum[i] = __fadd_rn(y[0], y[1]);
        if constexpr (kEach == 4) sum[i] = __fadd_rn(sum[i], __fadd_rn(y[2], y[3]));
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2)
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(kAll, sum[i], step));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sums[i].add(sum[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float sum = sums[i].value;
      if (i < count_ && (sum < cost_ || (sum == cost_ && pending_[i] < index_))) cost_ = sum, index_ = pending_[i];
    }
    count_ = 0;
  }

  const RowCode& code_;
  int first_head_, end_head_;
  RowOf row_of_;
  int lane_, pending_[kAtOnce] = {}, count_ = 0;
  float cost_ = -kMinusInf;
  int index_ = 0;
};

/// Which sides and heads a launch takes: the jobs are the heads of the keys, then those of the values. A side whose
/// centroids are chosen jointly is one job.
struct NearestJobs {
  int keys = 0, values = 0;
};

/// Grid [runs of rows, jobs].
/// @tparam kSplit  warps that share the centroids of a row: 1, or all of the block
template <typename T, int kDim, int kSplit>
__global__ void __launch_bounds__(kNearestThreads, 2)
    nearest_centroid_kernel(const __grid_constant__ WriteParams p, const __grid_constant__ CacheFormat format,
                            NearestJobs jobs) {
  constexpr int kRows = kTileTokens * kNearestWarps / kSplit, kTiles = kChunkCentroids / 8 / kSplit;
  constexpr int kSteps = kDim / 32, kRowEntries = 8 * kSplit, kWarpRows = kRows / kNearestWarps;
  __shared__ union Shared {
    CentroidChunk<kDim> chunk;
    BlockScores scores;
  } shared;
  alignas(8) __shared__ float half_norms[kChunkCentroids];
  __shared__ float squares[kRows], longest[kNearestWarps];
  __shared__ std::int64_t slots[kRows];
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  const bool value = static_cast<int>(blockIdx.y) >= jobs.keys;
  const int job = static_cast<int>(blockIdx.y) - (value ? jobs.keys : 0);
  const WriteSide& from = value ? p.v : p.k;
  const RowCode& code = from.code;
  const int first_head = code.joint ? 0 : job, end_head = code.joint ? p.num_kv_heads : job + 1;
  const int first_token = static_cast<int>(blockIdx.x) * kRows, warp_row = kSplit == 1 ? warp * kTileTokens : 0;

  bool goes_somewhere = false;
  for (int r = thread; r < kRows; r += kNearestThreads) {  // the kernel that writes the rows records wrong slots
    const std::int64_t slot = first_token + r < p.num_tokens ? p.slot_mapping[first_token + r] : -1;
    slots[r] = slot >= 0 && slot >> p.page_shift < p.extents.num_pages ? slot : -1;
    goes_somewhere |= slots[r] >= 0;
  }
  if (!__syncthreads_or(goes_somewhere)) return;

  // 1. Scores. Lane 4 g + t has, of the rows g and g + 8, the channels 32 j + 8 t + e.
  const auto row_of = [&](int row, int head) {
    const int token = min(first_token + row, p.num_tokens - 1);
    return static_cast<const T*>(from.x) + token * from.token_stride + static_cast<std::int64_t>(head) * kDim;
  };
  BestScores best[2][2];  // [row g, g + 8] [even, odd centroids]
#pragma unroll
  for (int i = 0; i < 4; ++i) best[i / 2][i % 2] = BestScores{};  // nvcc 13.0 initializes best[0] only
  float square[2] = {}, most = 0.0f;
  uint4 raw[2][kSteps];
  const auto load_rows = [&](int head, bool is_first) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        raw[r][j] = __ldg(reinterpret_cast<const uint4*>(row_of(warp_row + g + 8 * r, head)) + 4 * j + t);
        const unsigned words[4] = {raw[r][j].x, raw[r][j].y, raw[r][j].z, raw[r][j].w};
#pragma unroll
        for (int i = 0; i < 4 && is_first; ++i) {
          const float2 two = Pair<T>::to_float(words[i]);
          square[r] += two.x * two.x + two.y * two.y;
        }
      }
  };
  const auto take_scores = [&](const float(&c)[4], float2 halves, int centroid) {
    const float half[2] = {halves.x, halves.y};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (half[e] < -kMinusInf) most = fmaxf(most, half[e]);
#pragma unroll
      for (int r = 0; r < 2; ++r) best[r][e].add(c[2 * r + e] - half[e], centroid + e);
    }
  };
  if constexpr (kSplit == 1) {
    for (int first = 0; first < code.num_centroids; first += kChunkCentroids) {
      float c[kTiles][4] = {};
      for (int head = first_head; head < end_head; ++head) {
        __syncthreads();
        load_chunk<T, kDim>(code, head, first, head == first_head, shared.chunk, half_norms);
        if (first == 0 || code.joint) load_rows(head, first == 0);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint4* parts = shared.chunk.parts[8 * n + g] + t;
          add_products<T, kSteps>(c[n], raw, [&](int j, int half) { return parts[8 * j + 4 * half]; });
        }
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int own = 8 * n + 2 * t;
        take_scores(c[n], *reinterpret_cast<const float2*>(half_norms + own), first + own);
      }
    }
  } else {  // no centroid is needed by two warps
#pragma unroll 2
    for (int first = 8 * warp; first < code.num_centroids; first += kChunkCentroids) {
      float c[4] = {}, norm = 0.0f;
      const bool is_there = first + g < code.num_centroids;
      for (int head = first_head; head < end_head; ++head) {
        if (first == 8 * warp || code.joint) load_rows(head, first == 8 * warp);
        const auto* centroid = reinterpret_cast<const float4*>(
            generic::centroid_channel(code, head, is_there ? first + g : 0, kDim, 8 * t));
        float4 channels[2 * kSteps];
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) channels[i] = __ldg(centroid + i / 2 * 8 + i % 2);
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) norm += square_of(channels[i]);
        add_products<T, kSteps>(c, raw, [&](int j, int half) { return split<T>(channels[2 * j + half]); });
      }
      norm += __shfl_xor_sync(kAll, norm, 1), norm += __shfl_xor_sync(kAll, norm, 2);
      const float half = is_there ? 0.5f * norm : -kMinusInf;  // of centroid g; the lane has scores of 2 t and 2 t + 1
      take_scores(c, make_float2(__shfl_sync(kAll, half, 8 * t), __shfl_sync(kAll, half, 8 * t + 4)), first + 2 * t);
    }
  }

  // 2. Which centroids may be the nearest.
  __syncthreads();
  BlockScores& scores = shared.scores;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp_row + g + 8 * r;
#pragma unroll
    for (int step = 1; step < 4; step *= 2) square[r] += __shfl_xor_sync(kAll, square[r], step);
    if (t == 0 && (kSplit == 1 || warp == 0)) squares[row] = square[r];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int at = ((kSplit == 1 ? 0 : 8 * warp) + 2 * t + e) * kRows + row;
      scores.best[at] = best[r][e].best, scores.second[at] = best[r][e].second, scores.index[at] = best[r][e].index;
    }
  }
  most = generic::across_warp(most, [](float a, float b) { return fmaxf(a, b); });
  if (lane == 0) longest[warp] = most;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kNearestWarps; ++w) most = fmaxf(most, longest[w]);
  const int own_row = warp * kWarpRows + lane % kWarpRows;
  const float bound = score_bound<T>(squares[own_row], 2.0f * most, (end_head - first_head) * kDim);
  const Verdict verdict = judge(scores, own_row, kRowEntries, kRows, bound);
  const bool is_mine = lane < kWarpRows && slots[own_row] >= 0;
  int nearest = verdict.index;

  // 3. Where several may be, the sums of packing.md decide. If the second best score of an entry is high enough, all
  // centroids of that entry may be the nearest: every 8 * kSplit-th one.
  unsigned open = __ballot_sync(kAll, is_mine && nearest < 0);
  for (; open; open &= open - 1) {
    const int own = __ffs(static_cast<int>(open)) - 1, row = warp * kWarpRows + own;
    const float least = __shfl_sync(kAll, verdict.least, own);
    const auto channels_of = [&](int head) { return row_of(row, head); };
    NearestOf<kDim, decltype(channels_of)> sums(code, first_head, end_head, channels_of, lane);
    for (int i = 0; i < kRowEntries; ++i) {
      const int at = i * kRows + row;
      if (!(scores.second[at] < least))
        for (int centroid = i; centroid < code.num_centroids; centroid += kRowEntries) sums.add(centroid);
      else if (!(scores.best[at] < least))
        sums.add(scores.index[at]);
    }
    const int index = sums.result();
    if (lane == own) nearest = index;
  }

  if (!is_mine) return;
  const std::int64_t slot = slots[own_row];
  for (int head = first_head; head < end_head; ++head) {
    const PageTiles tile_of =
        generic::page_tiles(p.pages, p.page_stride, p.page_shift, format, p.num_kv_heads, head, value);
    generic::store_index(format.side(value), tile_of(slot), static_cast<int>(slot) % kTileTokens, nearest);
  }
}

}  // namespace kvq::write
