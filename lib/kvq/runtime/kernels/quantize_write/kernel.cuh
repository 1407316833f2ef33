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

/// Which head and side a job is: keys of all heads, then values.
struct WriteJob {
  bool value;
  int head, head_bytes, side_offset;  ///< bytes of a head in a page; of the side in its head
};
template <typename K, typename V>
__device__ __forceinline__ WriteJob write_job(const WriteParams& p, int job) {
  const int tiles = 1 << (p.page_shift - 4);
  const bool value = job >= p.num_kv_heads;
  return {value, job - (value ? p.num_kv_heads : 0), tiles * (K::side().bytes() + V::side().bytes()),
          value ? tiles * K::side().bytes() : 0};
}

constexpr int blocks_of_multiprocessor(int head_dim) { return head_dim > 128 ? 2 : 4; }

/// What a warp keeps in shared memory; lanes read nothing but what they put there themselves.
template <int kDim>
struct WarpShared {
  uint4 rows[2 * kDim / 32][32];  ///< the next rows
  uint4 matrices[2][32];          ///< matrix_operand() of keys and values
};

/// A warp's place among the tasks: 16 tokens of one head and side each, of one side all runs of tokens, of which all
/// heads, as rows lie in memory.
struct WriteTask {
  int run, head;  ///< runs of the second side follow those of the first
  __device__ __forceinline__ void advance(const WriteTask& by, int heads) {
    run += by.run, head += by.head;
    if (head >= heads) ++run, head -= heads;
  }
};

/// Rotates, codes and stores a warp's rows, which fetch_rows() has asked for.
/// @param next  asks for the next ones, once these are out of the way
template <typename Side, typename T, typename Next>
__device__ __forceinline__ void write_side(const WriteParams& p, const WriteSide& from, const WriteJob& job,
                                           int first_token, const WarpShared<Side::kHeadDim>& shared, Next next,
                                           int lane) {
  constexpr int kSteps = Side::kHeadDim / 32;
  const std::int64_t slots = load_mapping(p, p.slot_mapping, first_token, lane);
  uint4 raw[2][kSteps];
  ptx::cp_async_wait_group<0>();
#pragma unroll
  for (int i = 0; i < 2 * kSteps; ++i) raw[i / kSteps][i % kSteps] = shared.rows[i][lane];
  next();
  Rows<Side> rows;
  rotate_rows<Side, T>(from, raw, shared.matrices[job.value][lane], job.head, lane, rows);
  if (from.clip_ranks) rows.clip_rank = from.clip_ranks[job.head];
  code_rows<Side>(p, from, rows, job.value, slots, first_token, job.head, job.head_bytes, job.side_offset, lane);
}

/// Jobs from `first_job` on: of one side, or of both. Warps take turns, each with its next rows on the way. Grid: any.
/// @param turn  as many tasks as the grid has warps
template <typename K, typename V, typename T>
__global__ void __launch_bounds__(32 * kWarps, blocks_of_multiprocessor(K::kHeadDim))
    quantize_write_kernel(const __grid_constant__ WriteParams p, int first_job, int jobs, WriteTask turn) {
  static_assert(K::kHeadDim == V::kHeadDim);
  __shared__ WarpShared<K::kHeadDim> all_shared[kWarps];
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  WarpShared<K::kHeadDim>& shared = all_shared[warp];
  const int heads = p.num_kv_heads, runs = (p.num_tokens + kTileTokens - 1) / kTileTokens;
  const int end = jobs > heads ? 2 * runs : runs;
  const auto job_of = [&](const WriteTask& task) {
    return write_job<K, V>(p, first_job + task.head + (task.run >= runs ? heads : 0));
  };
  const auto first_token_of = [&](const WriteTask& task) {
    return (task.run - (task.run >= runs ? runs : 0)) * kTileTokens;
  };
  const auto fetch = [&](const WriteTask& task) {
    if (task.run >= end) return;
    const WriteJob job = job_of(task);
    fetch_rows<K, T>(job.value ? p.v : p.k, p, first_token_of(task), job.head, lane, shared.rows[0]);
  };
  const int first = static_cast<int>(blockIdx.x) * kWarps + warp;
  WriteTask task{first / heads, first % heads};
  shared.matrices[0][lane] = matrix_operand<T>(p.k.order, lane);
  shared.matrices[1][lane] = matrix_operand<T>(p.v.order, lane);
  wait_for_kernels_before();
  fetch(task);
  while (task.run < end) {
    const WriteJob job = job_of(task);
    const int first_token = first_token_of(task);
    task.advance(turn, heads);
    const auto next = [&] { fetch(task); };
    if constexpr (std::is_same_v<K, V>) {  // one piece of code for both, so that it stays in the cache
      write_side<K, T>(p, job.value ? p.v : p.k, job, first_token, shared, next, lane);
    } else {
      if (job.value)
        write_side<V, T>(p, p.v, job, first_token, shared, next, lane);
      else
        write_side<K, T>(p, p.k, job, first_token, shared, next, lane);
    }
  }
}

}  // namespace kvq::write
