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

/// One warp's task: 16 tokens of one head and side.
template <typename Side, typename T>
__device__ __forceinline__ void write_side(const WriteParams& p, const WriteSide& from, bool value, int first_token,
                                           int head, int head_bytes, int side_offset, int lane) {
  Rows<Side> rows;
  load_rotated<Side, T>(from, p, first_token, head, lane, rows);
  if (from.clip_ranks) rows.clip_rank = from.clip_ranks[head];
  code_rows<Side>(p, from, rows, value, first_token, head, head_bytes, side_offset, lane);
}

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

/// Grid [ceil(T / 16 / kWarps), jobs], from `first_job` on.
template <typename K, typename V, typename T>
__global__ void __launch_bounds__(32 * kWarps, K::kHeadDim > 128 ? 2 : 4)
    quantize_write_kernel(const __grid_constant__ WriteParams p, int first_job) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int first_token = (static_cast<int>(blockIdx.x) * kWarps + warp) * kTileTokens;
  if (first_token >= p.num_tokens) return;
  const WriteJob job = write_job<K, V>(p, first_job + static_cast<int>(blockIdx.y));
  if constexpr (std::is_same_v<K, V>) {  // one piece of code for both, so that it stays in the cache
    const WriteSide from = job.value ? p.v : p.k;
    write_side<K, T>(p, from, job.value, first_token, job.head, job.head_bytes, job.side_offset, lane);
  } else {
    if (job.value)
      write_side<V, T>(p, p.v, true, first_token, job.head, job.head_bytes, job.side_offset, lane);
    else
      write_side<K, T>(p, p.k, false, first_token, job.head, job.head_bytes, job.side_offset, lane);
  }
}

}  // namespace kvq::write
