#pragma once

#include <kvq/runtime/kernels/common/prefill_tiles.h>
#include <kvq/runtime/kernels/common/softmax_state.h>
#include <kvq/runtime/kernels/common/chunk.cuh>
#include <kvq/runtime/kernels/common/pair.cuh>

/// Which block attends for which rows. A work tile is a KV head of a sequence; its rows are the queries of all
/// its query heads. Row i is token i / heads and head i mod heads of the group, so that short chunks fill a block, too.
/// A block takes neighboring rows of a work tile. The first blocks take the last rows, because these see the most keys.
namespace kvq::prefill {

/// The rows and tiles of one thread block.
struct Work {
  Chunk chunk;
  int work_tile, head, heads;  ///< index in the slab; KV head; query heads of a KV head
  int first_row, rows;         ///< of the work tile
  int first_tile, tile_end;    ///< of keys
  int all_begin, all_end;      ///< positions between which every row of the block sees every key
  int window;

  /// @param block_rows   rows of a block
  /// @param tile_tokens  tokens of a KV chunk
  /// @param tile_limit   KV chunks of a work tile in the workspace
  __device__ __forceinline__ Work(const PrefillParams& p, const PrefillSlab& slab, int block, int block_rows,
                                  int tile_tokens, int tile_limit)
      : chunk(p, (slab.first_work_tile + block / slab.row_blocks) / p.cache.num_kv_heads) {
    work_tile = block / slab.row_blocks;
    head = (slab.first_work_tile + work_tile) % p.cache.num_kv_heads;
    heads = p.num_q_heads / p.cache.num_kv_heads;
    window = p.sliding_window;
    rows = chunk.queries * heads;
    first_row = (slab.row_blocks - 1 - block % slab.row_blocks) * block_rows;
    const int first = chunk.prefix + first_row / heads,
              last = chunk.prefix + (min(first_row + block_rows, rows) - 1) / heads;
    all_end = first + 1;
    all_begin = window > 0 ? max(0, last + 1 - window) : 0;
    first_tile = (window > 0 ? max(0, first + 1 - window) : 0) / tile_tokens;
    tile_end = min(last / tile_tokens + 1, tile_limit);
  }
  __device__ __forceinline__ bool empty() const { return first_row >= rows || first_tile >= tile_end; }
  /// Makes the block's share of the sequence's results NaN if there is a fault. All threads of the block call it.
  /// @tparam T  16-bit type of results  @param head_dim  of results
  /// @return  there is a fault: the block must not attend
  template <typename T>
  __device__ __forceinline__ bool refuse(const PrefillParams& p, const PrefillSlab& slab, int block,
                                         int head_dim) const {
    if (!chunk.fault) return false;
    const int share = block % slab.row_blocks, threads = static_cast<int>(blockDim.x);
    const int sequence = (slab.first_work_tile + work_tile) / p.cache.num_kv_heads;
    if (threadIdx.x == 0 && share == 0 && head == 0) record_fault(p.cache.faults, chunk.fault, sequence, p.cache.layer);
    for (int row = share; row < rows; row += slab.row_blocks) {
      T* out = static_cast<T*>(p.out) + element(row, p.out_stride, head_dim);
      for (int c = static_cast<int>(threadIdx.x); c < head_dim; c += threads) from_float(kNaN, out[c]);
      if (p.lse && threadIdx.x == 0)
        p.lse[static_cast<std::int64_t>(chunk.first_query + row / heads) * p.num_q_heads + head * heads + row % heads] =
            kNaN;
    }
    return true;
  }
  /// Does every row of the block see all `tokens` keys from `position` on?
  __device__ __forceinline__ bool whole(int position, int tokens) const {
    return position >= all_begin && position + tokens <= all_end;
  }
  /// Range [x, y) of the keys that a row sees. Rows behind the last row see the same keys as the last row.
  __device__ __forceinline__ int2 visible(int row) const {
    const int end = chunk.prefix + min(row, rows - 1) / heads + 1;
    return make_int2(window > 0 ? max(0, end - window) : 0, end);
  }
  /// Index of a row's first channel in an array [T, Hq, D].
  __device__ __forceinline__ std::int64_t element(int row, std::int64_t stride, int head_dim) const {
    return (chunk.first_query + row / heads) * stride + (head * heads + row % heads) * head_dim;
  }
};

/// The factor of a row's accumulated values, and the row's LSE.
struct Finished {
  float factor;  ///< 1 / sum of exponentials, the learned sink's included
  float lse;     ///< natural logarithm
  /// @param sink  logit of the learned sink in base 2, or -infinity
  __device__ __forceinline__ Finished(SoftmaxState state, float sink) {
    const float keep = state.merge({sink, 1.0f}, ptx::ex2).own;
    factor = keep / state.sum;
    lse = (state.max + log2f(state.sum)) * kLn2;
  }
};

}  // namespace kvq::prefill
