#pragma once

#include <kvq/runtime/kernels/demote/params.h>
#include <kvq/runtime/kernels/common/quantize/quantize_rows.cuh>

#include <type_traits>

/// Demotion (eviction from the recent window): quantizes exact rows of the windows into pages, as quantize_write
/// quantizes rotated rows. One warp takes 16 demotions of one head, side and layer.
namespace kvq::demote {

/// The head that a warp demotes, and where its side is in a page.
struct DemoteJob {
  int head, head_bytes, side_offset;  ///< bytes of a head in a page; of the side in its head
};

/// Demotes 16 tokens of one head and side. @param first  the first of them among `count` demotions
template <typename Side>
__device__ __forceinline__ void demote_side(const DemoteParams& p, const DemoteLayer& layer, const WriteSide& from,
                                            bool value, const DemoteJob& job, int first, int count, int lane) {
  const std::byte* windows = layer.windows;
  std::byte* pages = layer.pages;
  const int head = job.head;
  // Lane i < 16 holds source and destination of token i.
  const bool listed = lane < kTileTokens && first + lane < count;
  std::int64_t row[2];
  write::of_own_tokens(listed ? p.demote_from[first + lane] : -1, lane, row);
  const auto window_tile = [&](std::int64_t at) {
    return windows + p.window_layout.tile_pair(at, head) + (value ? p.window_layout.k.bytes() : 0);
  };
  write::Rows<Side> rows;
  write::load_exact<Side>(rows, row, window_tile, value, lane);
  if (from.clip_ranks) rows.clip_rank = from.clip_ranks[head];
  const PageTiles page_tile{pages, static_cast<unsigned>(p.page_stride), p.page_shift,
                            head * job.head_bytes + job.side_offset, Side::side().bytes()};
  const std::int64_t slots = listed ? p.demote_to[first + lane] : -1;
  write::quantize_rows<Side>(rows, from, slots, page_tile, value, lane);
}

/// Grid [runs of 16 demotions, at most kMaxRuns, ceil(2 Hkv / kWarps), L]: one warp for the keys of each head, then one
/// for the values of each head. More runs would mostly be empty blocks, because few steps evict max_demotions tokens.
constexpr int kMaxRuns = 32;

template <typename K, typename V>
__global__ void __launch_bounds__(32 * write::kWarps) demote_kernel(const __grid_constant__ DemoteParams p) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int count = min(*p.num_demotions, p.max_demotions);
  const int side_head = static_cast<int>(blockIdx.y) * write::kWarps + warp;
  if (side_head >= 2 * p.num_kv_heads) return;
  const DemoteLayer& layer = p.layers[blockIdx.z];
  const int tiles = 1 << (p.page_shift - 4), head_bytes = tiles * (K::side().bytes() + V::side().bytes());
  const bool value = side_head >= p.num_kv_heads;
  const DemoteJob job{side_head - (value ? p.num_kv_heads : 0), head_bytes, value ? tiles * K::side().bytes() : 0};
  for (int first = static_cast<int>(blockIdx.x) * kTileTokens; first < count;
       first += static_cast<int>(gridDim.x) * kTileTokens) {
    if constexpr (std::is_same_v<K, V>) {
      const WriteSide from = value ? layer.v : layer.k;
      demote_side<K>(p, layer, from, value, job, first, count, lane);
    } else {
      if (value)
        demote_side<V>(p, layer, layer.v, true, job, first, count, lane);
      else
        demote_side<K>(p, layer, layer.k, false, job, first, count, lane);
    }
  }
}

}  // namespace kvq::demote
