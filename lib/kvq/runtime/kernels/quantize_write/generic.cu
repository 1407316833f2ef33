#include <kvq/runtime/kernels/quantize_write/few_rows.h>
#include <kvq/runtime/kernels/quantize_write/nearest.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/common/centroids.cuh>
#include <kvq/runtime/kernels/common/generic_bits.cuh>
#include <kvq/runtime/kernels/common/generic_rows.cuh>
#include <kvq/runtime/kernels/common/row_teams.cuh>
#include <kvq/runtime/kernels/quantize_write/code_rows.cuh>
#include <kvq/runtime/kernels/quantize_write/rotate_rows.cuh>

#include <cuda_runtime.h>

#include <algorithm>

/// Generic write: rotates rows, quantizes and stores them in any format. A block takes up to 16 tokens of one head and
/// side: fewer if there are blocks to spare, because a warp may quantize its rows one after the other. few_rows.h takes
/// rows of bit tiles of calls with so few rows that each can have a block.
namespace kvq {

namespace generic {

/// The nearest centroid of each of the block's rows, while it is searched.
struct NearestCentroids {
  float cost[kWarps][kTileTokens];
  int index[kWarps][kTileTokens];  ///< of warp 0 in the end: that of all warps
};

/// Finds the nearest centroid of the rows that go to pages, from unrotated rows in global memory (packing.md,
/// "Centroids"). Each warp takes every fourth centroid. All threads of the block call it; begins and ends with a
/// barrier.
template <typename T>
__device__ __forceinline__ void search_centroids(const WriteParams& p, const WriteSide& from, int dim, int head,
                                                 int first, const std::int64_t* page, NearestCentroids& nearest) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int first_head = from.code.joint ? 0 : head, end_head = from.code.joint ? p.num_kv_heads : head + 1;
  __syncthreads();
  for (int r = 0; r < kTileTokens; ++r) {
    // Sums of rows that are not finite are all infinite or NaN; neither is below this cost, so their index is 0.
    float cost = -kMinusInf;
    int index = 0;
    for (int c = warp; page[r] >= 0 && c < from.code.num_centroids; c += kWarps) {
      SumOfSegments sum;
      for (int h = first_head; h < end_head; ++h) {
        const T* x =
            static_cast<const T*>(from.x) + (first + r) * from.token_stride + static_cast<std::int64_t>(h) * dim;
        sum.add(centroid_distance(from.code, h, c, dim, [&](int i) { return to_float(x[i]); }, lane));
      }
      if (sum.value < cost) cost = sum.value, index = c;
    }
    if (lane == 0) nearest.cost[warp][r] = cost, nearest.index[warp][r] = index;
  }
  __syncthreads();
  if (thread < kTileTokens)
    for (int w = 1; w < kWarps; ++w) {
      const float cost = nearest.cost[w][thread];
      const int index = nearest.index[w][thread];
      const bool is_equal = cost == nearest.cost[0][thread] && index < nearest.index[0][thread];
      if (cost < nearest.cost[0][thread] || is_equal) nearest.cost[0][thread] = cost, nearest.index[0][thread] = index;
    }
  __syncthreads();
}

/// What a kernel writes beside rows of code tiles and exact rows.
enum class RowKind {
  plain,      ///< nothing
  centroids,  ///< their residuals
  bits        ///< bit tiles, too
};

/// Blocks of a multiprocessor. The search of a trellis needs the registers of four.
constexpr int resident_blocks(RowKind kind, int most_dim) { return kind == RowKind::bits || most_dim > 128 ? 4 : 5; }
/// Blocks of a multiprocessor up to which warps take fewer rows each. Two blocks run nearly as fast as one. If a warp
/// searches its rows one after the other, four are faster than fewer blocks with more rows.
constexpr int spare_blocks(const WriteParams& p) {
  return p.k.code.searches_each_row || p.v.code.searches_each_row ? 4 : 2;
}

/// Grid [runs of kWarps * warp_rows tokens, jobs]: a job is the keys or the values of a head. Jobs count the keys of
/// all heads, then the values, from `first_job` on.
/// @tparam kMostDim   largest head_dim: 128 or kGenericHeadDim
/// @param bit_warps   warps of a block that quantize rows of bits: as many as dynamic shared memory has room for
/// @param warp_rows   rows of a warp, at most kMostSearched
/// @param bf16        rows are bfloat16, else fp16
template <RowKind kKind, int kMostDim>
__global__ void __launch_bounds__(kThreads, resident_blocks(kKind, kMostDim))
    generic_write_kernel(const __grid_constant__ WriteParams p, const __grid_constant__ CacheFormat format,
                         BitRowMemory bit_memory, int bit_warps, int warp_rows, int first_job, bool bf16) {
  static_assert(kWarps * kMostSearched == kTileTokens);
  __shared__ GenericRows<kMostDim> rows;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int job = first_job + static_cast<int>(blockIdx.y);
  const bool value = job >= p.num_kv_heads;
  const int head = job - (value ? p.num_kv_heads : 0);
  const WriteSide& from = value ? p.v : p.k;
  const TileSide& side = format.side(value);
  const int block_tokens = kWarps * warp_rows;
  const int dim = side.head_dim, first = static_cast<int>(blockIdx.x) * block_tokens;

  // 1. What the head's rows are, and the tokens' destinations.
  __shared__ HeadRows head_rows;
  if constexpr (kKind == RowKind::bits) {
    constexpr int kHeadWords = sizeof(HeadRows) / sizeof(unsigned);
    static_assert(sizeof(HeadRows) == kHeadWords * sizeof(unsigned));
    if (side.is_bits())
      for (int i = thread; i < kHeadWords; i += kThreads)
        reinterpret_cast<unsigned*>(&head_rows)[i] =
            __ldg(reinterpret_cast<const unsigned*>(from.code.heads + head) + i);
  }
  write::wait_for_kernels_before(p.holds_next);
  bool goes_somewhere = false;
  if (thread < kTileTokens) {
    const bool is_there = thread < block_tokens && first + thread < p.num_tokens;
    rows.page[thread] = is_there ? write::checked_slot(p, p.slot_mapping[first + thread]) : -1;
    rows.window[thread] =
        is_there && p.window_mapping ? write::checked_window_row(p, p.window_mapping[first + thread]) : -1;
    goes_somewhere = rows.page[thread] >= 0 || rows.window[thread] >= 0;
  }
  if (!__syncthreads_or(goes_somewhere)) return;

  // 2. Each warp loads and rotates its rows, and subtracts the center, which is rotated already.
  const auto rotate_own = [&](auto team, auto channel_of) {
    using Team = decltype(team);
    const int row = warp * warp_rows + min(team.row, warp_rows - 1);  // teams without a row take the last one, too
    const auto* of_row =
        static_cast<const std::uint16_t*>(from.x) + min(first + row, p.num_tokens - 1) * from.token_stride + head * dim;
    TeamRow<Team, kMostDim> x = {};
    for_each_slot<Team, kMostDim>(team, dim,
                                  [&](int j, int c) { x[j] = channel_of(row, c, from_16_bits(of_row[c], bf16)); });
    rotate_rows<kMostDim>(x, from, bf16, dim, head, team);
#pragma unroll
    for (int run = 0; run < kRuns<Team, kMostDim>; ++run)
      if (const int c = Team::kRun * run + 4 * team.lane; team.row < warp_rows && c < dim)
        *reinterpret_cast<float4*>(&rows.x[row][c]) = {x[4 * run], x[4 * run + 1], x[4 * run + 2], x[4 * run + 3]};
  };
  const auto rotate_block = [&](auto channel_of) {
    if (warp_rows == 1)
      rotate_own(OneRow(lane), channel_of);
    else
      rotate_own(ManyRows(lane), channel_of);
    if (!from.rotation) return;
    const std::byte* rotation = from.rotation + head * from.rotation_stride;
    with_16_bit_type(bf16, [&](auto type) {
      if (block_tokens == kWarps)
        multiply_packed<decltype(type), kWarps>(rows.x, dim, rotation);
      else
        multiply_packed<decltype(type), kTileTokens>(rows.x, dim, rotation);
    });
  };
  rotate_block([](int, int, float x) { return x; });
  if (from.center) {
    __syncwarp();
    for (int r = warp * warp_rows; r < (warp + 1) * warp_rows; ++r)
      for (int c = lane; c < dim; c += 32) rows.x[r][c] = __fsub_rn(rows.x[r][c], from.center[head * dim + c]);
  }
  __syncthreads();

  // 3. As bfloat16 into the windows.
  for (int i = warp; i < kTileTokens; i += kWarps) {
    if (rows.window[i] < 0) continue;
    std::byte* tile = write::window_tiles(p, rows.window[i], head) + (value ? p.ring_layout.k.bytes() : 0);
    const TileSide in_order{dim, 16, dim, 0};
    store_exact(rows.x[i], dim, value ? format.v : in_order, tile, static_cast<int>(rows.window[i] % kTileTokens),
                lane);
  }
  __syncthreads();

  // 4. Quantized into the pages; with centroids the rotated residual, because windows have rows without a centroid.
  const PageTiles tiles = page_tiles(p.pages, p.page_stride, p.page_shift, format, p.num_kv_heads, head, value);
  const int clip_rank = from.clip_ranks ? from.clip_ranks[head] : 0;
  if constexpr (kKind != RowKind::plain) {
    __shared__ NearestCentroids nearest;
    if (from.code.num_centroids > 0) {
      if (from.has_indices) {
        if (thread < kTileTokens && rows.page[thread] >= 0)
          nearest.index[0][thread] =
              load_index(side, tiles(rows.page[thread]), static_cast<int>(rows.page[thread]) % kTileTokens,
                         from.code.num_centroids);
        else if (thread < kTileTokens)
          nearest.index[0][thread] = 0;
        __syncthreads();
      } else {
        with_16_bit_type(
            bf16, [&](auto type) { search_centroids<decltype(type)>(p, from, dim, head, first, rows.page, nearest); });
      }
      rotate_block([&](int r, int c, float x) {
        return __fsub_rn(x, *centroid_channel(from.code, head, nearest.index[0][r], dim, c));
      });
      __syncthreads();
    }
    const auto put_index = [&](int i, bool finite, std::byte* tile, int token) {  // by one lane
      if (side.index_bytes > 0) store_index(side, tile, token, finite ? nearest.index[0][i] : 0);
    };
    if (kKind != RowKind::bits || !side.is_bits()) {
      store_each_row(rows, side, tiles, [&](int i, std::byte* tile, int token) {
        const bool finite = code_row(rows, i, side, format.bfloat(value), value, from.rule, clip_rank, tile, token);
        if (lane == 0) put_index(i, finite, tile, token);
      });
      return;
    }
    if constexpr (kKind == RowKind::bits) {
      __shared__ BitRows<kMostDim> bit_rows[kWarps];
      BitRows<kMostDim>& own = bit_rows[warp];
      if (lane == 0)
        own = bit_memory.at<kMostDim>(warp * bit_memory.bytes(), rows.x[0], side, from.rule,
                                      {side.number_size, format.bfloat(value)}, from.code.tables);
      store_tiles(rows, side, tiles, [&](auto tile_of_row) {
        for (int i = warp * warp_rows; warp < bit_warps && i < block_tokens; i += bit_warps * warp_rows) {
          int count = 0;
          unsigned numbers = 0;
          for (int r = i; r < i + warp_rows; ++r)
            if (rows.page[r] >= 0) numbers |= static_cast<unsigned>(r) << (4 * count++);
          if (count == 0) continue;
          if (lane == 0) own.count = count, own.numbers = numbers;
          __syncwarp();
          const auto code_own = [&](auto team) {
            const bool has_row = team.row < count;
            const int number = own.number(has_row ? team.row : 0),
                      token = static_cast<int>(rows.page[number]) % kTileTokens;
            std::byte* tile = has_row ? tile_of_row(number) : nullptr;
            const unsigned finite = code_bit_rows(team, own, head_rows, from.code, value, clip_rank, tile, token, lane);
            if (has_row && team.lane == 0) put_index(number, finite >> team.row & 1u, tile, token);
          };
          if (count == 1)
            code_own(OneRow(lane));
          else
            code_own(ManyRows(lane));
        }
      });
    }
  } else {
    store_each_row(rows, side, tiles, [&](int i, std::byte* tile, int token) {
      code_row(rows, i, side, format.bfloat(value), value, from.rule, clip_rank, tile, token);
    });
  }
}

namespace {

bool has_bits(const CacheFormat& format) { return format.k.is_bits() || format.v.is_bits(); }

template <RowKind kKind>
auto* kernel_of(const CacheFormat& format) {
  const bool small = std::max(format.k.head_dim, format.v.head_dim) <= 128;
  return small ? generic_write_kernel<kKind, 128> : generic_write_kernel<kKind, kGenericHeadDim>;
}
auto* kernel_of(const CacheFormat& format) {
  if (has_bits(format)) return kernel_of<RowKind::bits>(format);
  return format.k.index_bytes > 0 || format.v.index_bytes > 0 ? kernel_of<RowKind::centroids>(format)
                                                              : kernel_of<RowKind::plain>(format);
}

template <bool kBf16>
Status plan_write(WriteLaunch& launch) {
  auto* const kernel = kernel_of(launch.format);
  cudaFuncAttributes attributes = {};
  int device = 0, most = 0;
  cudaError_t error = load_kernel(kernel, launch.overlapping);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&launch.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  launch.shared_bytes = most - static_cast<int>(attributes.sharedSizeBytes);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.shared_bytes);
  Status status = cuda_status(error, "quantize_write: generic: plan");
  if (status.ok() && has_bits(launch.format)) status = plan_few_rows(launch);
  return status.ok() ? plan_centroids(launch, kBf16) : status;
}

/// Writes jobs by one launch. @param few  run_few_rows() takes their rows
Status launch_jobs(const WriteLaunch& launch, const WriteParams& params, bool few, int first_job, int jobs, bool bf16,
                   CUstream_st* stream) {
  if (few) return run_few_rows(launch, params, first_job, jobs, bf16, stream);
  const auto runs_of = [&](int warp_rows) {
    return (params.num_tokens + kWarps * warp_rows - 1) / (kWarps * warp_rows);
  };
  int warp_rows = 1;
  const std::int64_t most_blocks = std::int64_t{spare_blocks(params)} * launch.multiprocessors;
  while (warp_rows < kMostSearched && std::int64_t{runs_of(warp_rows)} * jobs > most_blocks) warp_rows *= 2;
  const dim3 grid(static_cast<unsigned>(runs_of(warp_rows)), static_cast<unsigned>(jobs));
  const TileSide &k = launch.format.k, &v = launch.format.v;
  const BitRowMemory memory{std::max(k.head_dim, v.head_dim), std::max(k.row_words, v.row_words),
                            std::max(params.k.code.search_bytes, params.v.code.search_bytes)};
  const bool bits = has_bits(launch.format);
  const int warps = bits ? std::min(kWarps, launch.shared_bytes / memory.bytes()) : 0;
  if (bits && warps == 0)
    return Status::fail(StatusCode::unsupported,
                        "quantize_write: the search of a trellis needs %d bytes of shared memory, this device has %d",
                        memory.bytes(), launch.shared_bytes);
  // It does not overlap the kernel before it: blocks that wait there would run unevenly over multiprocessors later, and
  // few tokens took twice as long. The kernel behind it may overlap this one.
  return cuda_status(launch_kernel(kernel_of(launch.format), grid, kThreads, warps * memory.bytes(), false, stream,
                                   params, launch.format, memory, warps, warp_rows, first_job, bf16),
                     "quantize_write: generic: launch");
}

Status run_jobs(const WriteLaunch& launch, const WriteParams& given, int first_job, int jobs, bool bf16,
                CUstream_st* stream) {
  if (given.num_tokens == 0) return {};
  WriteParams params = given;
  const Status chosen = choose_centroids(launch, params, bf16, stream);
  if (!chosen.ok()) return chosen;
  const int heads = params.num_kv_heads, keys = std::max(0, heads - first_job), values = jobs - keys;
  const bool few_keys = takes_few_rows(launch, params, false, jobs),
             few_values = takes_few_rows(launch, params, true, jobs);
  if (keys == 0 || values == 0 || few_keys == few_values)
    return launch_jobs(launch, params, keys > 0 ? few_keys : few_values, first_job, jobs, bf16, stream);
  const Status status = launch_jobs(launch, params, few_keys, first_job, keys, bf16, stream);
  return status.ok() ? launch_jobs(launch, params, few_values, heads, values, bf16, stream) : status;
}

template <bool kBf16>
Status run_write(const WriteLaunch& launch, const WriteParams& params, CUstream_st* stream) {
  return run_jobs(launch, params, 0, 2 * params.num_kv_heads, kBf16, stream);
}

}  // namespace

}  // namespace generic

Status run_generic_write(const WriteLaunch& launch, const WriteParams& params, int first_job, int jobs, bool bf16,
                         CUstream_st* stream) {
  return generic::run_jobs(launch, params, first_job, jobs, bf16, stream);
}

WriteVariant generic_write(const CacheFormat& format, bool bf16) {
  return {
      .name = bf16 ? "quantize_write_generic_bf16" : "quantize_write_generic_fp16",
      .k = format.k,
      .v = format.v,
      .k_bfloat = format.k_bfloat,
      .v_bfloat = format.v_bfloat,
      .bf16 = bf16,
      .plan_kernel = bf16 ? generic::plan_write<true> : generic::plan_write<false>,
      .run = bf16 ? generic::run_write<true> : generic::run_write<false>,
      .tuned = false,
  };
}

}  // namespace kvq
