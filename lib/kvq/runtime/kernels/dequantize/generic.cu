#include <kvq/runtime/kernels/common/prefill_rows.h>
#include <kvq/runtime/kernels/common/prefill_tiles.h>
#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/common/chunk.cuh>
#include <kvq/runtime/kernels/common/coded_rows.cuh>
#include <kvq/runtime/kernels/common/generic_rotate.cuh>
#include <kvq/runtime/kernels/dequantize/requested_rows.cuh>

#include <cuda_runtime.h>

#include <algorithm>

/// Generic dequantization: cached rows of any format as 16-bit numbers, with the rotation undone. A block takes 16
/// positions of one head and side at a time.
namespace kvq {

namespace generic {

/// The tokens of one head and side of a sequence, and their destination.
struct Output {
  int begin = 0, end = 0;            ///< positions that are read from the cache
  int first = 0, last = 0;           ///< range of tiles of 16 positions
  int keys = 0;                      ///< positions from `end` to `keys` come from the caller
  int fill_begin = 0, fill_end = 0;  ///< all other positions between these two become zeros
  int first_fresh = 0;               ///< index of the token at position `end` among the caller's new tokens
  SequenceTokens tokens = {};
  Fault fault = {};  ///< then all rows become NaN
  std::byte* to = nullptr;
  std::int64_t stride = 0;  ///< bytes from row to row
};

/// Destination: the caller's rows [T, Hkv, D].
template <typename T>
struct GenericToRows {
  static constexpr int kMinBlocks = 4;  ///< resident on a multiprocessor
  DequantizeParams p;
  KVQ_HD const PagedCacheView& cache() const { return p.cache; }
  __device__ __forceinline__ Output output(int sequence, int head, bool value, const CacheFormat& format) const {
    const RequestedRows rows = requested_rows(p, sequence);
    Output output;
    output.begin = rows.begin, output.end = rows.end, output.tokens = rows.tokens, output.fault = rows.fault;
    output.first = output.begin / kTileTokens;
    output.last = output.begin < output.end ? (output.end - 1) / kTileTokens + 1 : output.first;
    output.stride = (value ? p.v_stride : p.k_stride) * 2;
    output.to = static_cast<std::byte*>(value ? p.v : p.k) +
                (std::int64_t{rows.first_row} - output.begin) * output.stride + head * format.side(value).head_dim * 2;
    return output;
  }
  __device__ __forceinline__ std::byte* address(const Output& output, int position, int channel, bool, int) const {
    return output.to + position * output.stride + channel * 2;
  }
  __device__ __forceinline__ const T* fresh(const Output&, int, int, bool, int) const { return nullptr; }
};

/// Destination: the workspace of prefill attention. The prefix, then the new tokens, then zeros to the end of the last
/// tile.
/// @tparam kTuned  the workspace of a tuned variant (PrefillTiles), else of generic attention (PrefillRows)
template <typename T, bool kTuned>
struct GenericToWorkspace {
  static constexpr int kMinBlocks = 0;  ///< as many as the compiler finds room for
  PrefillParams p;
  PrefillSlab slab;
  int k_dim, v_dim;
  KVQ_HD const PagedCacheView& cache() const { return p.cache; }
  __device__ __forceinline__ int tokens() const { return kTuned ? PrefillTiles{k_dim}.tokens() : PrefillRows::kTokens; }
  __device__ __forceinline__ Output output(int sequence, int head, bool value, const CacheFormat&) const {
    Output output;
    const Chunk chunk(p, sequence);
    const int work_tile = sequence * p.cache.num_kv_heads + head - slab.first_work_tile;
    if (chunk.fault || chunk.queries <= 0 || work_tile < 0 || work_tile >= slab.work_tiles) return output;
    output.tokens = chunk.tokens, output.keys = chunk.keys(), output.end = chunk.prefix;
    const int first_key = chunk.first_key(p.sliding_window);
    output.begin = min(first_key, output.end);
    output.fill_begin = first_key / tokens() * tokens();
    output.fill_end = (output.keys + tokens() - 1) / tokens() * tokens();
    output.first = output.fill_begin / kTileTokens, output.last = output.fill_end / kTileTokens;
    output.first_fresh = chunk.first_query;
    if constexpr (kTuned)
      output.to = p.workspace + std::int64_t{work_tile} * slab.tiles * PrefillTiles{k_dim}.bytes() +
                  (value ? PrefillTiles{k_dim}.side_bytes() : 0);
    else
      output.to = p.workspace + work_tile * PrefillRows{k_dim, v_dim}.work_tile_bytes(slab.tiles);
    return output;
  }
  __device__ __forceinline__ std::byte* address(const Output& output, int position, int channel, bool value,
                                                int) const {
    if constexpr (kTuned) {
      const PrefillTiles tiles{k_dim};
      return output.to + std::int64_t{position / tiles.tokens()} * tiles.bytes() +
             tiles.offset(position % tiles.tokens(), channel);
    } else {
      return output.to + PrefillRows{k_dim, v_dim}.row(slab.tiles, position, value) + channel * 2;
    }
  }
  /// The caller's row of a position, or null for zeros.
  __device__ __forceinline__ const T* fresh(const Output& output, int position, int head, bool value, int dim) const {
    if (position < output.end || position >= output.keys) return nullptr;
    return static_cast<const T*>(value ? p.v : p.k) +
           (output.first_fresh + position - output.end) * (value ? p.v_stride : p.k_stride) + std::int64_t{head} * dim;
  }
};

/// Reads a token of an exact tile. @param order  as store_exact()
__device__ __forceinline__ void read_exact(const std::byte* tile, int dim, const TileSide& order, int token, float* row,
                                           int lane) {
  for (int c = lane; c < dim; c += 32)
    row[c] = __bfloat162float(
        *reinterpret_cast<const __nv_bfloat16*>(tile + exact_offset(dim, token, value_place(order, c))));
}

/// Reads a token from its page or window. A row whose page is not in the pool becomes NaN.
/// @param row      that of the token among the rows of its tile, [16, kGenericHeadDim]
/// @param scratch  of decode_rows(), if kDecodes: decodes_rows() of the format
template <bool kDecodes>
__device__ __forceinline__ void read_token(const PagedCacheView& cache, const CacheFormat& format,
                                           const SequenceTokens& tokens, int sequence, int head, bool value,
                                           int position, float* row, std::byte* scratch, int lane) {
  const TileSide& side = format.side(value);
  const TileSide in_order{side.head_dim, 16, side.head_dim, 0};
  if (tokens.is_exact(position)) {
    int in_slot;
    const std::byte* tile = exact_tiles(cache, position < tokens.sink_end, sequence, head, position, in_slot) +
                            (value ? cache.ring_layout.k.bytes() : 0);
    read_exact(tile, side.head_dim, value ? format.v : in_order, in_slot % kTileTokens, row, lane);
    return;
  }
  const PageLayout layout{format.k, format.v, cache.num_kv_heads, 1 << cache.page_shift};
  const std::int32_t* table = table_of(cache, sequence);
  const int page = page_of(cache, table, position);
  if (page < 0) {
    record_fault(cache.faults, {FaultCode::page, table[position >> cache.page_shift]}, sequence, cache.layer);
    for (int c = lane; c < side.head_dim; c += 32) row[c] = kNaN;
    return;
  }
  const int slot = position & (layout.page_size - 1), token = slot % kTileTokens;
  const std::byte* tile =
      cache.pages + page * cache.page_stride + (value ? layout.value_tile(head, slot) : layout.key_tile(head, slot));
  if (side.exact())
    read_exact(tile, side.head_dim, in_order, token, row, lane);
  else if (kDecodes && decodes_rows(side))
    decode_rows(tile, {side, value ? cache.code_v : cache.code_k, format.bfloat(value), value, head}, 1u << token,
                row - token * kGenericHeadDim, kGenericHeadDim, scratch, lane);
  else
    read_codes(tile, side, format.bfloat(value), value, token, row, lane);
}

/// Grid [workers, 2 Hkv]: keys of all heads, then values. @tparam kDecodes  decodes_rows() of the format
template <typename T, typename Destination, bool kDecodes>
__global__ void __launch_bounds__(kThreads, Destination::kMinBlocks)
    generic_dequantize_kernel(const __grid_constant__ Destination destination,
                              const __grid_constant__ CacheFormat format) {
  __shared__ __align__(16) float rows[kTileTokens][kGenericHeadDim];
  __shared__ __align__(16) std::byte scratch[kDecodes ? kMostScratchBytes : 16];
  const PagedCacheView& cache = destination.cache();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const bool value = static_cast<int>(blockIdx.y) >= cache.num_kv_heads;
  const int head = static_cast<int>(blockIdx.y) - (value ? cache.num_kv_heads : 0);
  const int dim = format.side(value).head_dim, chunks = dim / 8;
  const DeviceRotation& rotation = value ? cache.rotation_v : cache.rotation_k;
  const float* center = value ? cache.center_v : cache.center_k;
  const int mine = static_cast<int>(blockIdx.x), all = static_cast<int>(gridDim.x);
  int before = 0;  // tiles of the sequences before: tile i of all sequences goes to block i mod `all`
  for (int sequence = 0; sequence < cache.batch; ++sequence) {
    const Output output = destination.output(sequence, head, value, format);
    int tile = output.first + (mine - before % all + all) % all;
    before += output.last - output.first;
    if (output.fault && thread == 0 && mine == 0 && head == 0 && !value)
      record_fault(cache.faults, output.fault, sequence, cache.layer);
    for (; tile < output.last; tile += all) {
      const int first = tile * kTileTokens;
      for (int r = warp; r < kTileTokens; r += kWarps)
        if (first + r >= output.begin && first + r < output.end && !output.fault)
          read_token<kDecodes>(cache, format, output.tokens, sequence, head, value, first + r, rows[r], scratch, lane);
      __syncthreads();
      if (first < output.end) {
        if (rotation.matrix && !value) {  // the matrix of keys is A^-T, so it is read transposed
          const float* matrix = rotation.matrix + static_cast<std::int64_t>(rotation.per_head ? head : 0) * dim * dim;
          multiply_matrix<kTileTokens>(rows[0], dim, kGenericHeadDim,
                                       [&](int k, int column) { return __ldg(matrix + column * dim + k); });
        } else {
          rotate_rows<kTileTokens>(rows[0], dim, kGenericHeadDim, rotation, head, true);
        }
      }
      for (int i = thread; i < kTileTokens * chunks; i += kThreads) {
        const int r = i / chunks, position = first + r, channel = i % chunks * 8;
        __align__(16) T eight[8];
        if (position >= output.begin && position < output.end) {
#pragma unroll
          for (int e = 0; e < 8; ++e)
            from_float(output.fault ? kNaN : rows[r][channel + e] + (center ? center[head * dim + channel + e] : 0.0f),
                       eight[e]);
        } else if (position >= output.fill_begin && position < output.fill_end) {
          const T* from = destination.fresh(output, position, head, value, dim);
          *reinterpret_cast<uint4*>(eight) =
              from ? __ldg(reinterpret_cast<const uint4*>(from + channel)) : make_uint4(0, 0, 0, 0);
        } else {
          continue;
        }
        *reinterpret_cast<uint4*>(destination.address(output, position, channel, value, dim)) =
            *reinterpret_cast<const uint4*>(eight);
      }
      __syncthreads();
    }
  }
}

namespace {

template <typename T, typename Destination>
auto kernel_for(const CacheFormat& format) {
  return decodes_rows(format) ? generic_dequantize_kernel<T, Destination, true>
                              : generic_dequantize_kernel<T, Destination, false>;
}

/// Number of blocks that are resident at once.
template <typename T, typename Destination>
Status count_blocks(const CacheFormat& format, int& blocks) {
  int device = 0, multiprocessors = 0, each = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel_for<T, Destination>(format), kThreads, 0);
  blocks = each * multiprocessors;
  return cuda_status(error, "dequantize: generic: plan");
}

template <typename T, typename Destination>
Status launch(const Destination& destination, const CacheFormat& format, int blocks, CUstream_st* stream) {
  const int sides = 2 * destination.cache().num_kv_heads;
  if (destination.cache().batch == 0) return {};
  const dim3 grid(static_cast<unsigned>(std::max(1, blocks / sides)), static_cast<unsigned>(sides));
  return cuda_status(
      launch_kernel(kernel_for<T, Destination>(format), grid, kThreads, 0, false, stream, destination, format),
      "dequantize: generic: launch");
}

template <typename T>
Status plan(DequantizeLaunch& launch) {
  Status status = count_blocks<T, GenericToRows<T>>(launch.format, launch.blocks);
  int blocks = 0;
  return status.ok() ? count_blocks<T, GenericToWorkspace<T, true>>(launch.format, blocks)
                     : status;  // loads the kernel, too
}

template <typename T>
Status run(const DequantizeLaunch& planned, const DequantizeParams& params, CUstream_st* stream) {
  return launch<T>(GenericToRows<T>{params}, planned.format, planned.blocks, stream);
}

template <typename T>
Status to_tiles(const DequantizeLaunch& planned, const PrefillParams& params, const PrefillSlab& slab,
                CUstream_st* stream) {
  const CacheFormat& format = planned.format;
  return launch<T>(GenericToWorkspace<T, true>{params, slab, format.k.head_dim, format.v.head_dim}, format,
                   planned.blocks, stream);
}

template <typename T>
Status to_rows(const CacheFormat& format, int blocks, const PrefillParams& params, const PrefillSlab& slab,
               CUstream_st* stream) {
  return launch<T>(GenericToWorkspace<T, false>{params, slab, format.k.head_dim, format.v.head_dim}, format, blocks,
                   stream);
}

}  // namespace

}  // namespace generic

DequantizeVariant generic_dequantize(const CacheFormat& format, bool bf16) {
  DequantizeVariant variant{
      .name = bf16 ? "dequantize_generic_bf16" : "dequantize_generic_fp16",
      .k = format.k,
      .v = format.v,
      .k_bfloat = format.k_bfloat,
      .v_bfloat = format.v_bfloat,
      .bf16 = bf16,
  };
  variant.plan_kernel = bf16 ? generic::plan<__nv_bfloat16> : generic::plan<__half>;
  variant.run = bf16 ? generic::run<__nv_bfloat16> : generic::run<__half>;
  if (format.k.head_dim == format.v.head_dim && format.k.head_dim % 64 == 0)
    variant.to_tiles = bf16 ? generic::to_tiles<__nv_bfloat16> : generic::to_tiles<__half>;
  variant.tuned = false;
  return variant;
}

Status generic_prefill_rows(const DequantizeVariant& rows, int blocks, const PrefillParams& params,
                            const PrefillSlab& slab, CUstream_st* stream) {
  return rows.bf16 ? generic::to_rows<__nv_bfloat16>(rows.format(), blocks, params, slab, stream)
                   : generic::to_rows<__half>(rows.format(), blocks, params, slab, stream);
}

Status generic_prefill_rows_blocks(const DequantizeVariant& rows, int& blocks) {
  using namespace generic;
  return rows.bf16 ? count_blocks<__nv_bfloat16, GenericToWorkspace<__nv_bfloat16, false>>(rows.format(), blocks)
                   : count_blocks<__half, GenericToWorkspace<__half, false>>(rows.format(), blocks);
}

}  // namespace kvq
