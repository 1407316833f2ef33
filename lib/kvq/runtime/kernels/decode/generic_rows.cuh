#pragma once

#include <kvq/runtime/kernels/common/coded_rows.cuh>
#include <kvq/runtime/kernels/decode/generic_tiles.cuh>

/// Attention of a warp to tiles whose rows it has decoded into shared memory (decodes_rows()). Lanes are assigned as in
/// generic_tiles.cuh.
namespace kvq::generic {

/// Floats from row to row: lanes that read eight rows at once meet different banks.
KVQ_HD constexpr int row_stride(const CacheFormat& format) {
  const int k = format.k.head_dim, v = format.v.head_dim;
  return (k > v ? k : v) + 4;
}
/// Shared memory of a warp: one coded tile, the decoded rows, the scratch of decode_rows().
KVQ_HD constexpr int tile_bytes(const CacheFormat& format) {
  const int k = format.k.exact() ? 0 : format.k.bytes(), v = format.v.exact() ? 0 : format.v.bytes();
  return k > v ? k : v;
}
KVQ_HD constexpr int row_bytes(const CacheFormat& format) { return kTileTokens * row_stride(format) * 4; }
KVQ_HD constexpr int row_warp_bytes(const CacheFormat& format) {
  const int k = scratch_bytes(format.k), v = scratch_bytes(format.v), scratch = k > v ? k : v;
  return tile_bytes(format) + row_bytes(format) + (scratch + 15) / 16 * 16;
}

/// Tokens of a tile that the query sees, bit by bit.
__device__ __forceinline__ unsigned seen_tokens(const SeenTile& tile, int lane) {
  return __ballot_sync(kAll, lane < kTileTokens && tile.seen(lane));
}

/// Starts the copy of one side of a coded tile. All lanes of a warp call it.
__device__ __forceinline__ void fetch_side(const std::byte* from, int bytes, std::byte* to, int lane) {
  for (int i = 16 * lane; i < bytes; i += 16 * 32) ptx::cp_async_16(ptx::shared_address(to + i), from + i);
}

/// Decodes the tokens of a tile that are seen, and sets the others to 0, because the tile may hold anything there.
__device__ __forceinline__ void rows_of_tile(const std::byte* tile, const CodedSide& of, unsigned seen, float* rows,
                                             int stride, std::byte* scratch, int lane) {
  decode_rows(tile, of, seen, rows, stride, scratch, lane);
  for_tokens(~seen & 0xFFFFu, [&](int token) {
    for (int c = lane; c < of.side.head_dim; c += 32) rows[token * stride + c] = 0.0f;
  });
  __syncwarp();
}

/// Adds the lane's part of the scores of the tokens r and r + 8. @param q  [kHeads, D]
__device__ __forceinline__ void score_rows(const float* rows, int stride, int dim, const float* q, int lane,
                                           float (&scores)[2][kHeads]) {
  const float* own = rows + lane / 4 * stride;
#pragma unroll 1
  for (int channel = lane % 4 * 8; channel < dim; channel += 32) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 four = *reinterpret_cast<const float4*>(own + 8 * i * stride + channel + 4 * half);
        x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
      }
      add_products(x, q + channel + 4 * half, dim, scores);
    }
  }
}

/// Adds the lane's weighted values. @param channels  [D] channel of each place
template <int kMaxDim>
__device__ __forceinline__ void add_rows(const float* rows, int stride, int dim, const std::uint8_t* channels,
                                         const float (&weights)[kHeads][4], int lane,
                                         float (&values)[kHeads][kMaxDim / 8]) {
#pragma unroll
  for (int a = 0; a < kMaxDim / 8; ++a) {
    if (8 * a >= dim) break;
    const int channel = channels[8 * a + lane / 4];
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = rows[value_token(lane, i) * stride + channel];
#pragma unroll
    for (int head = 0; head < kHeads; ++head) values[head][a] = weighted(x, weights[head], values[head][a]);
  }
}

}  // namespace kvq::generic
