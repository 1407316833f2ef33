#include <kvq/runtime/kernels/demote/variant.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/common/generic_rows.cuh>

#include <cuda_runtime.h>

#include <algorithm>

/// Generic demotion: quantizes exact rows of the windows into pages of any format. A block takes 16 demotions of one
/// head, side and layer.
namespace kvq {

namespace generic {

constexpr int kMostRuns = 32;  ///< blocks for runs of 16 demotions; few steps have max_demotions, so blocks loop

/// Grid [runs, 2 Hkv, L]: keys of all heads, then values.
__global__ void __launch_bounds__(kThreads)
    generic_demote_kernel(const __grid_constant__ DemoteParams p, const __grid_constant__ CacheFormat format) {
  __shared__ GenericRows rows;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const bool value = static_cast<int>(blockIdx.y) >= p.num_kv_heads;
  const int head = static_cast<int>(blockIdx.y) - (value ? p.num_kv_heads : 0), dim = format.side(value).head_dim;
  const DemoteLayer& layer = p.layers[blockIdx.z];
  const WriteSide& from = value ? layer.v : layer.k;
  const TileSide in_order{dim, 16, dim, 0};
  const PageTiles tile_of = page_tiles(layer.pages, p.page_stride, p.page_shift, format, p.num_kv_heads, head, value);
  const int count = min(*p.num_demotions, p.max_demotions);
  for (int first = static_cast<int>(blockIdx.x) * kTileTokens; first < count;
       first += static_cast<int>(gridDim.x) * kTileTokens) {
    if (thread < kTileTokens) {
      const bool is_there = first + thread < count;
      rows.window[thread] = is_there ? p.demote_from[first + thread] : -1;
      rows.page[thread] = is_there && rows.window[thread] >= 0 ? p.demote_to[first + thread] : -1;
    }
    __syncthreads();
    for (int i = warp; i < kTileTokens; i += kWarps) {
      if (rows.page[i] < 0) continue;
      const std::byte* tile =
          layer.windows + p.window_layout.tile_pair(rows.window[i], head) + (value ? p.window_layout.k.bytes() : 0);
      const int token = static_cast<int>(rows.window[i] % kTileTokens);
      for (int c = lane; c < dim; c += 32)
        rows.x[i][c] = __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(
            tile + exact_offset(dim, token, value_place(value ? format.v : in_order, c))));
    }
    __syncthreads();
    code_rows(rows, format, value, from.rule, from.clip_ranks ? from.clip_ranks[head] : 0, tile_of);
    __syncthreads();
  }
}

namespace {

Status load_demote() { return cuda_status(load_kernel(generic_demote_kernel), "demote: generic: load"); }

Status run_demote(const DemoteVariant& variant, const DemoteParams& params, CUstream_st* stream) {
  if (params.max_demotions == 0 || params.num_layers == 0) return {};
  const int runs = (params.max_demotions + kTileTokens - 1) / kTileTokens;
  const dim3 grid(static_cast<unsigned>(std::min(runs, kMostRuns)), static_cast<unsigned>(2 * params.num_kv_heads),
                  static_cast<unsigned>(params.num_layers));
  return cuda_status(launch_kernel(generic_demote_kernel, grid, kThreads, 0, false, stream, params, variant.format()),
                     "demote: generic: launch");
}

}  // namespace

}  // namespace generic

DemoteVariant generic_demote(const CacheFormat& format) {
  return {
      .name = "demote_generic",
      .k = format.k,
      .v = format.v,
      .k_bfloat = format.k_bfloat,
      .v_bfloat = format.v_bfloat,
      .load = generic::load_demote,
      .run_kernel = generic::run_demote,
      .tuned = false,
  };
}

}  // namespace kvq
