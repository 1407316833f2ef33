#pragma once

#include <kvq/runtime/kernels/common/prefill_tiles.h>
#include <kvq/runtime/kernels/common/chunk.cuh>
#include <kvq/runtime/kernels/dequantize/requested_rows.cuh>

/// Where dequantized rows go, and who makes them. Blocks share the tokens of a head and side; each warp takes warp
/// tiles, T::kTokens tokens at a time, and T::kColumns of their channels.
namespace kvq::dequantize {

/// Destination: the caller's rows [T, Hkv, D].
template <typename T>
struct ToRows {
  DequantizeParams p;
  /// The tokens of one sequence, head and side.
  struct OutputRows {
    int first_warp_tile, warp_tile_end;  ///< in warp tiles: kTokens tokens each
    int begin, end;                      ///< positions that are read from the cache
    SequenceTokens tokens;
    Fault fault;  ///< then all rows become NaN
    unsigned char* to;
    std::int64_t stride;  ///< bytes
  };
  KVQ_HD const PagedCacheView& cache() const { return p.cache; }
  __device__ __forceinline__ OutputRows output(int sequence, int head, bool value) const {
    const RequestedRows rows = requested_rows(p, sequence);
    OutputRows output;
    output.begin = rows.begin, output.end = rows.end, output.tokens = rows.tokens, output.fault = rows.fault;
    output.first_warp_tile = output.begin / T::kTokens;
    output.warp_tile_end = output.begin < output.end ? (output.end - 1) / T::kTokens + 1 : output.first_warp_tile;
    output.stride = (value ? p.v_stride : p.k_stride) * 2;
    output.to = static_cast<unsigned char*>(value ? p.v : p.k) +
                (std::int64_t{rows.first_row} - output.begin) * output.stride + head * T::kHeadDim * 2;
    return output;
  }
  __device__ __forceinline__ uint4* address(const OutputRows& output, int position, int channel) const {
    return reinterpret_cast<uint4*>(output.to + position * output.stride + channel * 2);
  }
  __device__ __forceinline__ void fill(const OutputRows&, int, int, bool, int, int) const {}
  __device__ __forceinline__ void refuse(const OutputRows& output, int sequence, int head, bool value, int first_column,
                                         int thread, int threads) const {
    if (thread == 0 && head == 0 && !value) record_fault(p.cache.faults, output.fault, sequence, p.cache.layer);
    constexpr int kChunks = T::kColumns / 8;
    for (int i = thread; i < (output.end - output.begin) * kChunks; i += threads)
      *address(output, output.begin + i / kChunks, first_column + i % kChunks * 8) = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
};

/// Destination: the tiles of prefill attention. The prefix, then the new tokens, then zeros to the end of the last
/// tile.
template <typename T>
struct ToTiles {
  PrefillParams p;
  PrefillSlab slab;
  KVQ_HD static constexpr PrefillTiles layout() { return {T::kHeadDim}; }
  struct OutputTiles {
    int first_warp_tile, warp_tile_end;
    int begin, end;   ///< positions that are read from the cache
    int keys;         ///< tokens of prefix and chunk (the new tokens)
    int first_query;  ///< index of the chunk's first token among the tokens of all chunks
    SequenceTokens tokens;
    Fault fault;  ///< then no tile is written
    std::byte* to;
  };
  KVQ_HD const PagedCacheView& cache() const { return p.cache; }
  __device__ __forceinline__ OutputTiles output(int sequence, int head, bool value) const {
    const Chunk chunk(p, sequence);
    constexpr int kTokens = layout().tokens();  // of a tile of the workspace
    const int work_tile = sequence * p.cache.num_kv_heads + head - slab.first_work_tile;
    OutputTiles output;
    output.first_query = chunk.first_query;
    output.tokens = chunk.tokens, output.fault = chunk.fault;
    output.keys = chunk.keys(), output.end = chunk.prefix;
    output.begin = min(chunk.first_key(p.sliding_window), output.end);
    output.first_warp_tile = chunk.first_key(p.sliding_window) / kTokens * (kTokens / T::kTokens);
    output.warp_tile_end = chunk.queries > 0 && work_tile >= 0 && work_tile < slab.work_tiles
                               ? (output.keys + kTokens - 1) / kTokens * (kTokens / T::kTokens)
                               : output.first_warp_tile;
    output.to = p.workspace + static_cast<std::int64_t>(work_tile) * slab.tiles * layout().bytes() +
                (value ? layout().side_bytes() : 0);
    return output;
  }
  __device__ __forceinline__ uint4* address(const OutputTiles& output, int position, int channel) const {
    return reinterpret_cast<uint4*>(output.to +
                                    static_cast<std::int64_t>(position / layout().tokens()) * layout().bytes() +
                                    layout().offset(position % layout().tokens(), channel));
  }
  __device__ __forceinline__ void refuse(const OutputTiles&, int, int, bool, int, int, int) const {}
  /// Writes the tokens of a warp tile that are not read from the cache: the chunk's, and zeros for those that no query
  /// sees.
  __device__ __forceinline__ void fill(const OutputTiles& output, int warp_tile, int head, bool value, int first_column,
                                       int lane) const {
    const int first = warp_tile * T::kTokens;
    if (first >= output.begin && first + T::kTokens <= output.end) return;
    constexpr int kChunks = T::kColumns / 8;
    const auto* from = static_cast<const typename T::Activation*>(value ? p.v : p.k);
    const std::int64_t stride = value ? p.v_stride : p.k_stride;
    for (int i = lane; i < T::kTokens * kChunks; i += 32) {
      const int position = first + i / kChunks, channel = first_column + i % kChunks * 8;
      if (position >= output.begin && position < output.end) continue;
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (position >= output.end && position < output.keys)
        eight = __ldg(reinterpret_cast<const uint4*>(from + (output.first_query + position - output.end) * stride +
                                                     head * T::kHeadDim + channel));
      *address(output, position, channel) = eight;
    }
  }
};

/// The tokens of one head and side that this warp takes, of all sequences; `workers` blocks share them, this block is
/// number `worker`. All lanes call it.
/// @tparam kNoneCoded  pages hold exact rows
/// @param whole  whole(output, sequence, first) makes the tokens first .. first + kTokens - 1, all of which are coded
/// @param part   part(output, sequence, first) makes those of the tokens first .. first + 15 that the cache has
template <typename T, bool kNoneCoded, typename Destination, typename Whole, typename Part>
__device__ __forceinline__ void for_warp_tiles(const Destination& destination, bool value, int head, int first_column,
                                               int worker, int workers, Whole whole, Part part) {
  const PagedCacheView& cache = destination.cache();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int mine = worker * T::kWarps + warp, all = workers * T::kWarps;
  int before = 0;  // warp tiles of the sequences before: warp tile i of all sequences goes to warp i mod `all`
  for (int sequence = 0; sequence < cache.batch; ++sequence) {
    const auto output = destination.output(sequence, head, value);
    if (output.fault) {
      destination.refuse(output, sequence, head, value, first_column, mine * 32 + lane, all * 32);
      continue;
    }
    const PositionRange coded = output.tokens.coded_from(output.begin);
    int warp_tile = output.first_warp_tile + (mine - before % all + all) % all;
    before += output.warp_tile_end - output.first_warp_tile;
    for (; warp_tile < output.warp_tile_end; warp_tile += all) {
      const int first = warp_tile * T::kTokens;
      if (!kNoneCoded && first >= coded.begin && first + T::kTokens <= min(output.end, coded.end)) {
        whole(output, sequence, first);
      } else {
#pragma unroll 1
        for (int tile = first; tile < min(first + T::kTokens, output.end); tile += kTileTokens)
          part(output, sequence, tile);
      }
      destination.fill(output, warp_tile, head, value, first_column, lane);
    }
  }
}

}  // namespace kvq::dequantize
