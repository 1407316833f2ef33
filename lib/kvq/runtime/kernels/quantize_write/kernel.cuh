#pragma once

#include <kvq/runtime/kernels/quantize_write/params.h>
#include <kvq/runtime/kernels/quantize_write/code_rows.cuh>
#include <kvq/runtime/kernels/quantize_write/residuals.cuh>
#include <kvq/runtime/kernels/quantize_write/rotate.cuh>

#include <type_traits>

/// Rotates rows, quantizes them exactly as packing.md says and writes them into pages (formats/pages.md), in one pass:
/// a row is read once, and only its codes, scales and minima are written.
///
/// One warp takes 16 tokens of one head and side. Lane 4 g + t holds, of the tokens g and g + 8, the channels
/// 32 j + 8 t + e, e = 0..7. It loads each eight of them as 16 bytes, and they make up its pieces (formats/pages.md) of
/// the stored rows.
namespace kvq::write {

/// Which head and side a warp or block writes, and where they are in a page.
struct WriteJob {
  bool value;
  int head, head_bytes, side_offset;  ///< bytes of a head in a page; of the side in its head
};
/// Of tiles whose sizes come with the call.
__device__ __forceinline__ WriteJob job_of_sides(const WriteParams& p, bool value, int head) {
  const int tiles = 1 << (p.page_shift - 4);
  return {value, head, tiles * (p.k_tile_bytes + p.v_tile_bytes), value ? tiles * p.k_tile_bytes : 0};
}
template <typename K, typename V>
__device__ __forceinline__ WriteJob write_job(const WriteParams& p, bool value, int head) {
  const int tiles = 1 << (p.page_shift - 4);
  if constexpr (kScratchBytes<K> > 0) return job_of_sides(p, value, head);  // a kernel of one side
  return {value, head, tiles * (K::side().bytes() + V::side().bytes()), value ? tiles * K::side().bytes() : 0};
}

constexpr int blocks_of_multiprocessor(int head_dim) { return head_dim > 128 ? 2 : 4; }

/// Shared memory of one warp. Of rows and matrices, each lane reads only words that it stored itself, so no barrier is
/// needed.
template <typename Side, bool kScaled>
struct WarpShared {
  static constexpr int kDim = Side::kHeadDim, kScratch = kScratchBytes<Side>;
  /// A matrix with factors is kept if there is room for it, else computed for each run.
  static constexpr bool kKeepsScaled = kScaled && kDim <= 128 && kScratch <= 4096;
  uint4 rows[2 * kDim / 32][32];                                       ///< the next rows (prefetch)
  uint4 matrix[32];                                                    ///< matrix_operand() of the warp's side
  uint4 scaled[kKeepsScaled ? ScaledMatrix<kDim>::kOperands : 1][32];  ///< ScaledMatrix::operand() of its head
  uint4 scratch[kScratch > 0 ? (kScratch + 15) / 16 : 1];              ///< kScratchBytes
  SideTables<Side> tables;                                             ///< of its head
};

/// Factors of the lane's channels.
__device__ __forceinline__ const std::uint16_t* factors_of(const WriteSide& side, int head, int head_dim, int lane) {
  return side.factors + (side.per_head ? head * head_dim : 0) + 8 * (lane & 3);
}

/// How warps share the work: each has one job, which is a head of one side, and every `stride`-th of the runs of 16
/// tokens. The runs at both ends of the call go first, and their warps are those that have one run fewer, because in a
/// prompt they have exact rows to store, too.
struct WriteRuns {
  int end, stride;  ///< in runs
  int first_runs;   ///< runs at the beginning that go first
  int last_round;   ///< first turn of the last round, in which the first `idle` warps of a job have none
  int idle;
  int jobs;          ///< number of jobs
  bool both_sides;   ///< even jobs are keys, odd ones values, so that each block has both
  bool values_only;  ///< if not both_sides: values, else keys

  __device__ __forceinline__ bool is_value(int job) const { return both_sides ? job & 1 : values_only; }
  __device__ __forceinline__ int head(int job) const { return both_sides ? job >> 1 : job; }
  /// The run of a warp's turn: a warp's first turn is its number among those of its job, the next ones are `stride`
  /// behind each other. `end` if there is none.
  __device__ __forceinline__ int run_of(int turn) const {
    if (turn >= last_round) {
      turn -= idle;
      if (turn < last_round) return end;
    }
    if (turn >= end) return end;
    return turn < first_runs ? turn : end - 1 - (turn - first_runs);
  }
};

/// Rotates, quantizes and stores a warp's rows, which fetch_rows() copies to shared memory.
/// @param part  see load_destinations()
/// @param next  starts the copies of the next rows. It is called behind the rotation: earlier or later is slower
template <typename Side, typename T, bool kScaled, typename Shared, typename Next>
__device__ __forceinline__ void write_side(const WriteParams& p, const WriteSide& from, const WriteJob& job,
                                           int first_token, int part, Shared& shared, Next next, int lane) {
  constexpr int kSteps = Side::kHeadDim / 32;
  const Destinations to = load_destinations<Side>(p, first_token, part, lane);
  uint4 raw[2][kSteps];
  ptx::cp_async_wait_group<0>();
  const auto read_rows = [&] {
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) raw[i / kSteps][i % kSteps] = shared.rows[i][lane];
  };
  read_rows();
  Rows<Side> rows;
  const uint4 matrix = shared.matrix[lane];
  const auto scaled = [&](int index) {
    if constexpr (Shared::kKeepsScaled) return shared.scaled[index][lane];
    return ScaledMatrix<Side::kHeadDim>::template operand<T>(factors_of(from, job.head, Side::kHeadDim, lane), matrix,
                                                             index);
  };
  if constexpr (Side::side().index_bytes > 0) {
    if (__any_sync(kAll, to.window_row >= 0)) {  // windows have rows without a centroid
      rotate_rows<Side, T, kScaled>(from, raw, matrix, scaled, job.head, lane, rows);
      store_window_rows<Side>(p, rows, job.value, to, job.head, lane);
      read_rows();
    }
    const PageTiles tile_of = page_tiles<Side>(p, job.head, job.head_bytes, job.side_offset);
    const std::int64_t slots = checked_slot(p, to.slot);
    load_residuals<Side, T>(from, raw, slots, tile_of, job.head, lane, rows);
    next();
    rotate_residuals<Side>(from, matrix_operand<__nv_bfloat16>(from.order, lane), rows);
    if (from.clip_ranks) rows.clip_rank = from.clip_ranks[job.head];
    quantize_rows<Side>(rows, from, slots, tile_of, job.value, lane);
    return;
  }
  rotate_rows<Side, T, kScaled>(from, raw, matrix, scaled, job.head, lane, rows);
  next();
  if (from.clip_ranks) rows.clip_rank = from.clip_ranks[job.head];
  store_rows<Side>(p, from, rows, job.value, to, job.head, job.head_bytes, job.side_offset, first_token, shared.tables,
                   reinterpret_cast<std::byte*>(shared.scratch), lane);
}

/// Each warp loops over its runs and prefetches its next rows. Grid: any with at least one warp for each job. If the
/// number of warps is not a multiple of the jobs, the last warps stay idle.
/// @tparam kScaled  the sides have channel factors
template <typename K, typename V, typename T, bool kScaled>
__global__ void __launch_bounds__(32 * kWarps, blocks_of_multiprocessor(K::kHeadDim))
    quantize_write_kernel(const __grid_constant__ WriteParams p, const __grid_constant__ WriteRuns runs) {
  static_assert(K::kHeadDim == V::kHeadDim);
  static_assert(kScratchBytes<K> == kScratchBytes<V> && std::is_same_v<SideTables<K>, SideTables<V>>);
  using Shared = WarpShared<K, kScaled>;
  __shared__ Shared all_shared[kWarps];
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  Shared& shared = all_shared[warp];
  const int parts = HasSegments<K> ? p.row_parts : 1, warp_number = static_cast<int>(blockIdx.x) * kWarps + warp;
  const int part = warp_number & (parts - 1), first = warp_number / parts;
  int turn = first / runs.jobs;
  const int own_job = first - turn * runs.jobs;
  int run = turn < runs.stride ? runs.run_of(turn) : runs.end;
  const bool is_value = runs.is_value(own_job);
  {
    const WriteSide& from = is_value ? p.v : p.k;
    shared.matrix[lane] = matrix_operand<T>(from.order, lane);
    shared.tables.load(from.code, runs.head(own_job), lane);
    if constexpr (Shared::kKeepsScaled) {  // needs no wait: factors belong to the model, no kernel writes them
      const std::uint16_t* factors = factors_of(from, runs.head(own_job), K::kHeadDim, lane);
#pragma unroll  // so that the loads of all factors are in flight at once
      for (int i = 0; i < ScaledMatrix<K::kHeadDim>::kOperands; ++i)
        shared.scaled[i][lane] = ScaledMatrix<K::kHeadDim>::template operand<T>(factors, shared.matrix[lane], i);
    }
  }
  wait_for_kernels_before(p.holds_next);
  const auto fetch = [&](int at) {
    const int job = ptx::derive_again(own_job);
    if (at < runs.end)
      fetch_rows<K, T>(runs.is_value(job) ? p.v : p.k, p, at * kTileTokens, runs.head(job), lane, shared.rows[0]);
  };
  fetch(run);
  const auto write_runs = [&]<typename Side>(Side) {
    while (run < runs.end) {
      const int job = ptx::derive_again(own_job), first_token = run * kTileTokens;
      const bool value = runs.is_value(job);
      turn += runs.stride;
      run = runs.run_of(turn);
      write_side<Side, T, kScaled>(
          p, value ? p.v : p.k, write_job<K, V>(p, value, runs.head(job)), first_token, part, shared,
          [&] { fetch(run); }, lane);
    }
  };
  if constexpr (std::is_same_v<K, V>) {  // the same code for both sides, so that it stays in the instruction cache
    write_runs(K{});
  } else if (is_value) {
    write_runs(V{});
  } else {
    write_runs(K{});
  }
}

}  // namespace kvq::write
