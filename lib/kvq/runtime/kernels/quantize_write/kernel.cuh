#pragma once

#include <kvq/runtime/kernels/quantize_write/params.h>
#include <kvq/runtime/kernels/quantize_write/code_rows.cuh>
#include <kvq/runtime/kernels/quantize_write/rotate.cuh>

#include <type_traits>

/// Rotates rows, quantises them exactly as packing.md says and writes them into pages (formats/pages.md), in one pass:
/// a row is read once, and only its codes and numbers are written.
///
/// One warp takes 16 tokens of one head and side. Lane 4 g + t holds, of the tokens g and g + 8, the channels 32 j + 8
/// t + e, e = 0..7: what it loads as 16 bytes each, and what its pieces of the page's rows are made of.
namespace kvq::write {

/// Which head and side a warp or block writes, and where these are in a page.
struct WriteJob {
  bool value;
  int head, head_bytes, side_offset;  ///< bytes of a head in a page; of the side in its head
};
template <typename K, typename V>
__device__ __forceinline__ WriteJob write_job(const WriteParams& p, bool value, int head) {
  const int tiles = 1 << (p.page_shift - 4);
  return {value, head, tiles * (K::side().bytes() + V::side().bytes()), value ? tiles * K::side().bytes() : 0};
}

constexpr int blocks_of_multiprocessor(int head_dim) { return head_dim > 128 ? 2 : 4; }

/// What a warp keeps in shared memory; lanes read nothing but what they put there themselves.
template <int kDim, bool kScaled>
struct WarpShared {
  /// A matrix with factors is kept where blocks have room for it, else made for each run.
  static constexpr bool kKeepsScaled = kScaled && kDim <= 128;
  uint4 rows[2 * kDim / 32][32];                                       ///< the next rows
  uint4 matrices[2][32];                                               ///< matrix_operand() of keys and values
  uint4 scaled[kKeepsScaled ? ScaledMatrix<kDim>::kOperands : 1][32];  ///< ScaledMatrix::operand() of the side at hand
};

/// Factors of the lane's channels.
__device__ __forceinline__ const std::uint16_t* factors_of(const WriteSide& side, int head, int head_dim, int lane) {
  return side.factors + (side.per_head ? head * head_dim : 0) + 8 * (lane & 3);
}

/// The runs of 16 tokens of a head: of one side, or of keys and then of values. A warp has one head, and of its runs
/// every `stride`-th.
struct WriteRuns {
  int of_side, end, stride;
  bool values_only;

  __device__ __forceinline__ bool is_value(int run) const { return values_only || run >= of_side; }
  __device__ __forceinline__ int first_token(int run) const {
    return (run - (run >= of_side ? of_side : 0)) * kTileTokens;
  }
};

/// Rotates, codes and stores a warp's rows, which fetch_rows() has asked for.
/// @param next  asks for the next ones. After the rotation: earlier or later is slower
template <typename Side, typename T, bool kScaled, typename Next>
__device__ __forceinline__ void write_side(const WriteParams& p, const WriteSide& from, const WriteJob& job,
                                           int first_token, const WarpShared<Side::kHeadDim, kScaled>& shared,
                                           Next next, int lane) {
  constexpr int kSteps = Side::kHeadDim / 32;
  const std::int64_t slots = load_mapping(p, p.slot_mapping, first_token, lane);
  uint4 raw[2][kSteps];
  ptx::cp_async_wait_group<0>();
#pragma unroll
  for (int i = 0; i < 2 * kSteps; ++i) raw[i / kSteps][i % kSteps] = shared.rows[i][lane];
  Rows<Side> rows;
  const uint4 matrix = shared.matrices[job.value][lane];
  const auto scaled = [&](int index) {
    if constexpr (WarpShared<Side::kHeadDim, kScaled>::kKeepsScaled) return shared.scaled[index][lane];
    return ScaledMatrix<Side::kHeadDim>::template operand<T>(factors_of(from, job.head, Side::kHeadDim, lane), matrix,
                                                             index);
  };
  rotate_rows<Side, T, kScaled>(from, raw, matrix, scaled, job.head, lane, rows);
  next();
  if (from.clip_ranks) rows.clip_rank = from.clip_ranks[job.head];
  code_rows<Side>(p, from, rows, job.value, slots, first_token, job.head, job.head_bytes, job.side_offset, lane);
}

/// Warps take turns, each with its next rows on the way. Grid: any that has a warp for each head; its last warps stay
/// idle if they are fewer than heads.
/// @tparam kScaled  sides have factors of channels
template <typename K, typename V, typename T, bool kScaled>
__global__ void __launch_bounds__(32 * kWarps, blocks_of_multiprocessor(K::kHeadDim))
    quantize_write_kernel(const __grid_constant__ WriteParams p, const __grid_constant__ WriteRuns runs) {
  static_assert(K::kHeadDim == V::kHeadDim);
  using Shared = WarpShared<K::kHeadDim, kScaled>;
  __shared__ Shared all_shared[kWarps];
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  Shared& shared = all_shared[warp];
  const int first = static_cast<int>(blockIdx.x) * kWarps + warp;
  int run = first / p.num_kv_heads;
  const int head = first - run * p.num_kv_heads;
  if (run >= runs.stride) run = runs.end;
  const auto fetch = [&](int at) {
    if (at >= runs.end) return;
    fetch_rows<K, T>(runs.is_value(at) ? p.v : p.k, p, runs.first_token(at), head, lane, shared.rows[0]);
  };
  shared.matrices[0][lane] = matrix_operand<T>(p.k.order, lane);
  shared.matrices[1][lane] = matrix_operand<T>(p.v.order, lane);
  wait_for_kernels_before();
  fetch(run);
  int kept = -1;  // whose matrix with factors is in shared memory: 1 = values
  const auto write_runs = [&]<typename Side>(Side, bool value, int end) {
    while (run < end) {
      const bool is_value = std::is_same_v<K, V> ? runs.is_value(run) : value;
      if constexpr (Shared::kKeepsScaled) {
        if (kept != static_cast<int>(is_value)) {
          kept = is_value;
          const std::uint16_t* factors = factors_of(is_value ? p.v : p.k, head, K::kHeadDim, lane);
#pragma unroll  // all factors are asked for before the first is waited for
          for (int i = 0; i < ScaledMatrix<K::kHeadDim>::kOperands; ++i)
            shared.scaled[i][lane] =
                ScaledMatrix<K::kHeadDim>::template operand<T>(factors, shared.matrices[is_value][lane], i);
        }
      }
      const WriteJob job = write_job<K, V>(p, is_value, head);
      const int first_token = runs.first_token(run);
      run += runs.stride;
      write_side<Side, T, kScaled>(p, is_value ? p.v : p.k, job, first_token, shared, [&] { fetch(run); }, lane);
    }
  };
  if constexpr (std::is_same_v<K, V>) {  // one piece of code for both, so that it stays in the cache
    write_runs(K{}, false, runs.end);
  } else {
    write_runs(K{}, false, runs.values_only ? 0 : runs.of_side);
    write_runs(V{}, true, runs.end);
  }
}

}  // namespace kvq::write
