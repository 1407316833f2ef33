#include <kvq/runtime/kernels/quantize_write/few_rows.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/common/generic_bits.cuh>
#include <kvq/runtime/kernels/quantize_write/code_rows.cuh>
#include <kvq/runtime/kernels/quantize_write/rotate_rows.cuh>

#include <cuda_runtime.h>

#include <algorithm>

namespace kvq {

namespace generic {

/// Rows for each multiprocessor up to which a call has a block for each row: as many blocks as run there at once.
constexpr int kFewBlocks = 4;

/// Where a row goes.
struct RowDestination {
  std::byte* tile;          ///< of a page, or null
  int token;                ///< of the tile
  std::int64_t window_row;  ///< or negative
};

/// Dynamic shared memory of a block: the codes of the row and its words, then what each warp needs.
struct FewRowsMemory {
  int dim = 0;           ///< the larger one of both sides
  int row_words = 0;     ///< likewise
  int search_bytes = 0;  ///< likewise, RowCode::search_bytes
  KVQ_HD static constexpr int aligned(int bytes) { return (bytes + 15) / 16 * 16; }
  KVQ_HD constexpr int codes() const { return aligned(code_stride(dim) + 4); }  // packing reads behind the last one
  KVQ_HD constexpr int words() const { return aligned(4 * row_words); }
  KVQ_HD constexpr int y() const { return 4 * y_stride(dim); }
  KVQ_HD constexpr int warp_bytes() const { return y() + aligned(search_bytes); }
  KVQ_HD constexpr int bytes() const { return codes() + words() + kWarps * warp_bytes(); }

  /// What a warp takes for its segments. @param x  the row
  template <int kMostDim>
  __device__ __forceinline__ BitRows<kMostDim> at(int warp, float* x, const TileSide& side, ScaleRule rule,
                                                  NumberType type, const float* tables) const {
    const int own = codes() + words() + warp * warp_bytes();
    return {
        .count = 1,
        .numbers = 0,
        .x = x,
        .dim = side.head_dim,
        .side = side,
        .rule = rule,
        .type = type,
        .tables = tables,
        .y_at = own,
        .codes_at = 0,
        .words_at = codes(),
        .word_stride = words() / 4,
        .search_at = own + y(),
    };
  }
};

/// Writes one row of bits. Grid: [tokens, jobs], jobs as those of generic_write_kernel. Warp w quantizes the segments
/// w, w + kWarps, and so on. The last warp stores the row. It computes the row's address, and where codes go in it,
/// while other warps search: this code runs once, and takes longer to fetch than to execute.
/// @param bf16  rows are bfloat16, else fp16
template <int kMostDim>
__global__ void __launch_bounds__(kThreads, kFewBlocks)
    few_rows_kernel(const __grid_constant__ WriteParams p, const __grid_constant__ CacheFormat format,
                    FewRowsMemory memory, int first_job, bool bf16) {
  __shared__ __align__(16) float x[1][kMostDim];  // the rotated row
  __shared__ HeadRows head_rows;
  __shared__ BitRows<kMostDim> warp_rows[kWarps];
  __shared__ RowDestination to;
  // Results of segment_energy() and encode_segment() for each segment of a row with one scale.
  constexpr int kMost = HeadRows::kMostSegments;
  __shared__ float energies[kMost], squares[kMost], products[kMost];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int token = static_cast<int>(blockIdx.x);
  const int job = first_job + static_cast<int>(blockIdx.y);
  const bool value = job >= p.num_kv_heads;
  const int head = job - (value ? p.num_kv_heads : 0);
  const WriteSide& from = value ? p.v : p.k;
  const TileSide& side = format.side(value);
  const int dim = side.head_dim;
  const OneRow team(lane);
  const bool stores = warp == kWarps - 1;

  // 1. What the head's rows are.
  constexpr int kHeadWords = sizeof(HeadRows) / sizeof(unsigned);
  static_assert(sizeof(HeadRows) == kHeadWords * sizeof(unsigned));
  for (int i = thread; i < kHeadWords; i += kThreads)
    reinterpret_cast<unsigned*>(&head_rows)[i] = __ldg(reinterpret_cast<const unsigned*>(from.code.heads + head) + i);
  if (lane == 0)
    warp_rows[warp] =
        memory.at<kMostDim>(warp, x[0], side, from.rule, {side.number_size, format.bfloat(value)}, from.code.tables);
  const BitRows<kMostDim>& rows = warp_rows[warp];

  // 2. The rotated row, and where it goes.
  write::wait_for_kernels_before(p.holds_next);
  if (stores && lane == 0) {
    const std::int64_t page_row = p.slot_mapping[token], window_row = p.window_mapping ? p.window_mapping[token] : -1;
    const std::int64_t slot = write::checked_slot(p, page_row);
    to.window_row = write::checked_window_row(p, window_row);
    to.token = static_cast<int>(slot % kTileTokens);
    to.tile = slot < 0 ? nullptr
                       : page_tiles(p.pages, p.page_stride, p.page_shift, format, p.num_kv_heads, head, value)(slot);
  }
  if (warp == 0) {
    const auto* of_row = static_cast<const std::uint16_t*>(from.x) + token * from.token_stride + head * dim;
    TeamRow<OneRow, kMostDim> own = {};
    for_each_slot<OneRow, kMostDim>(team, dim, [&](int j, int c) { own[j] = from_16_bits(of_row[c], bf16); });
    rotate_rows<kMostDim>(own, from, bf16, dim, head, team);
    for_each_slot<OneRow, kMostDim>(team, dim, [&](int j, int c) { x[0][c] = own[j]; });
  }
  __syncthreads();
  if (to.tile == nullptr && to.window_row < 0) return;
  if (from.rotation)
    with_16_bit_type(bf16, [&](auto type) {
      multiply_packed<decltype(type), 1>(x, dim, from.rotation + head * from.rotation_stride);
    });
  if (from.center) {
    for (int c = thread; c < dim; c += kThreads) x[0][c] = __fsub_rn(x[0][c], from.center[head * dim + c]);
    __syncthreads();
  }

  // 3. As bfloat16 into a window.
  if (stores && to.window_row >= 0) {
    std::byte* tile = write::window_tiles(p, to.window_row, head) + (value ? p.ring_layout.k.bytes() : 0);
    const TileSide in_order{dim, 16, dim, 0};
    store_exact(x[0], dim, value ? format.v : in_order, tile, static_cast<int>(to.window_row % kTileTokens), lane);
  }
  if (to.tile == nullptr) return;

  // 4. Quantized into a page.
  PackedCodes packed;  // the lane's first codes
  if (stores) packed = PackedCodes::of(head_rows, value, lane), clear_words(team, rows);
  const int segments = head_rows.num_segments;
  const unsigned finite = finite_rows(team, rows);
  const auto put = [&](int, int number, unsigned bits) {
    if (lane == 0 && finite) put_number(to.tile, side, to.token, number, bits);
  };
  if (from.code.one_scale) {
    for (int s = warp; s < segments; s += kWarps) {
      const float energy = segment_energy(rows, head_rows.segments[s], team);
      if (lane == 0) energies[s] = energy;
    }
    __syncthreads();
    const FirstScale first = first_scale(head_rows, rows.type, [&](int s) { return energies[s]; });
    for (int s = warp; s < segments; s += kWarps) {
      const ScaleSums<float> own = encode_segment(team, rows, head_rows.segments[s], first.d, lane);
      if (lane == 0) squares[s] = own.squares, products[s] = own.products;
    }
    __syncthreads();
    if (!stores) return;
    ScaleSums<SumOfSegments> sums;
    for (int s = 0; s < segments; ++s) sums.squares.add(squares[s]), sums.products.add(products[s]);
    if (segments > 0) put(0, 0, last_scale(first, sums, rows.rule, rows.type));
  } else {
    if (const int rank = from.clip_ranks ? from.clip_ranks[head] : 0; rank > 0) {
      __syncthreads();
      if (warp == 0 && finite) clip_row<kMostDim>(x[0], dim, rank, lane);
      __syncthreads();
    }
    for (int s = warp; s < segments; s += kWarps)
      encode_groups(team, rows, head_rows, head_rows.segments[s], finite, put, lane);
    __syncthreads();
    if (!stores) return;
  }
  finish_rows(team, rows, head_rows, from.code.one_scale, finite, to.tile, to.token);
  __syncwarp();
  packed.put(rows.codes_of(0), rows.words_of(0));
  pack_words(team, rows, head_rows, value, 32);
  __syncwarp();
  store_words(team, rows, value, to.tile, to.token);
}

namespace {

auto* kernel_of(const CacheFormat& format) {
  const bool small = std::max(format.k.head_dim, format.v.head_dim) <= 128;
  return small ? few_rows_kernel<128> : few_rows_kernel<kGenericHeadDim>;
}

FewRowsMemory memory_of(const WriteLaunch& launch, const WriteParams& params) {
  const TileSide &k = launch.format.k, &v = launch.format.v;
  return {std::max(k.head_dim, v.head_dim), std::max(k.row_words, v.row_words),
          std::max(params.k.code.search_bytes, params.v.code.search_bytes)};
}

}  // namespace

}  // namespace generic

Status plan_few_rows(const WriteLaunch& launch) {
  auto* const kernel = generic::kernel_of(launch.format);
  cudaError_t error = load_kernel(kernel);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.shared_bytes);
  return cuda_status(error, "quantize_write: few rows: plan");
}

bool takes_few_rows(const WriteLaunch& launch, const WriteParams& params, bool value, int jobs) {
  const RowCode& code = (value ? params.v : params.k).code;
  return launch.format.side(value).is_bits() && code.num_centroids == 0 &&
         std::int64_t{params.num_tokens} * jobs <= std::int64_t{generic::kFewBlocks} * launch.multiprocessors &&
         generic::memory_of(launch, params).bytes() <= launch.shared_bytes;
}

Status run_few_rows(const WriteLaunch& launch, const WriteParams& params, int first_job, int jobs, bool bf16,
                    CUstream_st* stream) {
  const generic::FewRowsMemory memory = generic::memory_of(launch, params);
  const dim3 grid(static_cast<unsigned>(params.num_tokens), static_cast<unsigned>(jobs));
  // Blocks that wait for the kernel before have room beside each other: there are few of them.
  return cuda_status(launch_kernel(generic::kernel_of(launch.format), grid, generic::kThreads, memory.bytes(),
                                   launch.overlapping, stream, params, launch.format, memory, first_job, bf16),
                     "quantize_write: few rows: launch");
}

}  // namespace kvq
