#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/common/generic_tiles.cuh>
#include <kvq/runtime/kernels/common/sequences.cuh>
#include <kvq/runtime/kernels/common/softcap.cuh>
#include <kvq/runtime/kernels/decode/passes.cuh>

/// Attention of a warp to tiles of 16 tokens of one KV head. The assignment of lanes follows the layout of pages:
///
///   lane 4 r + t    keys of the tokens r and r + 8, of each 32 channels those from 8 t on ("Key tiles")
///   lane 4 r + u    values of the tokens 2 u, 2 u + 8, 2 u + 1 and 2 u + 9, at the places 8 a + r ("Exact windows")
namespace kvq::generic {

constexpr int kHeads = 4;  ///< query heads that a warp attends for at once

enum class TileSource { sinks, pages, ring };

/// Sixteen tokens from `position` on; the query sees positions begin .. end - 1.
struct SeenTile {
  int position, begin, end;
  TileSource source;
  const decode::RowSight* sight;  ///< null: the query sees all positions from begin to end
  __device__ __forceinline__ bool coded() const { return source == TileSource::pages; }
  __device__ __forceinline__ bool seen(int token) const {
    return position + token >= begin && position + token < end && (!sight || sight->sees(position + token));
  }
};

/// The tiles with the tokens that a query sees: of sinks, pages, recent tokens. All begin at positions that are
/// multiples of 16. A pass has one query.
class SeenTiles {
 public:
  Fault fault;  ///< then there are no tiles
  int sequence;
  int row;      ///< of q and out
  bool exists;  ///< the pass has a query

  /// @param of_query  shared memory, for what the query sees if masks say it; read it after a barrier
  __device__ __forceinline__ SeenTiles(const DecodeKernelParams& p, int number, decode::RowSight& of_query) {
    const decode::Pass pass = decode::load_pass(p, number);
    sequence = pass.sequence, row = pass.first_row, exists = pass.queries.count > 0;
    fault = pass.checked.fault;
    SequenceTokens tokens = pass.checked.tokens;
    if (!fault) fault = ring_fault(p.cache, tokens, sequence);
    if (fault) tokens = {};
    const decode::SeenRanges seen = decode::seen_by_pass(p, number, tokens.length);
    const decode::TileChunks c = decode::chunks_of(tokens, seen, decode::ChunkTokens{kTileTokens, kTileTokens});
    first = c.begin, end = c.end, sink_end = c.sink_end;
    coded = {c.coded_begin, c.coded_end};
    sinks = c.sink_chunks, coded_tiles = c.coded_chunks, recent = c.recent_chunks;
    sight = p.token_masks ? &of_query : nullptr;
    if (sight && threadIdx.x == 0) of_query = decode::sight_of(p, pass, 0);
  }
  __device__ __forceinline__ int count() const { return sinks + coded_tiles + recent; }
  __device__ __forceinline__ SeenTile operator[](int i) const {
    if (i < sinks) return {(first / kTileTokens + i) * kTileTokens, first, sink_end, TileSource::sinks, sight};
    i -= sinks;
    if (i < coded_tiles)
      return {(coded.begin / kTileTokens + i) * kTileTokens, coded.begin, coded.end, TileSource::pages, sight};
    i -= coded_tiles;
    return {(coded.end / kTileTokens + i) * kTileTokens, coded.end, end, TileSource::ring, sight};
  }

 private:
  int first, end, sink_end;
  const decode::RowSight* sight;
  PositionRange coded;
  int sinks, coded_tiles, recent;  ///< numbers of tiles
};

/// First bytes of a key tile and a value tile.
struct TilePair {
  const std::byte *k, *v;
};

/// Finds the tiles of one KV head of a sequence. Coded tiles are copied to shared memory, exact tiles are read from
/// global memory.
struct TileReader {
  const DecodeParams& p;
  const PageLayout pages;
  int sequence, head;
  int k_bytes, v_bytes;  ///< of a tile in shared memory, keys first

  __device__ __forceinline__ TileReader(const DecodeParams& params, const PageLayout& layout, int of_sequence,
                                        int of_head)
      : p(params),
        pages(layout),
        sequence(of_sequence),
        head(of_head),
        k_bytes(layout.k.exact() ? 0 : layout.k.bytes()),
        v_bytes(layout.v.exact() ? 0 : layout.v.bytes()) {}

  /// The page of a coded tile, or -1 if it is not in the pool. Load it early to hide the latency.
  __device__ __forceinline__ int page_of(const SeenTile& tile) const {
    if (!tile.coded()) return 0;
    const std::int32_t* table = table_of(p.cache, sequence);
    const int page = kvq::page_of(p.cache, table, tile.position);
    if (page < 0)
      record_fault(p.cache.faults, {FaultCode::page, table[tile.position >> p.cache.page_shift]}, sequence,
                   p.cache.layer);
    return page;
  }
  __device__ __forceinline__ TilePair in_memory(const SeenTile& tile, int page) const {
    if (tile.coded()) {
      const int slot = tile.position & ((1 << p.cache.page_shift) - 1);
      const std::byte* at = p.cache.pages + page * p.cache.page_stride;
      return {at + pages.key_tile(head, slot), at + pages.value_tile(head, slot)};
    }
    int row;
    const std::byte* at = exact_tiles(p.cache, tile.source == TileSource::sinks, sequence, head, tile.position, row);
    return {at, at + p.cache.ring_layout.k.bytes()};
  }
  /// Starts asynchronous copies of the coded sides of a tile. All lanes of a warp call it.
  __device__ __forceinline__ void fetch(const SeenTile& tile, int page, std::byte* stage, int lane) const {
    if (!tile.coded() || page < 0) return;
    const TilePair at = in_memory(tile, page);
    for (int i = 16 * lane; i < k_bytes; i += 16 * 32) ptx::cp_async_16(ptx::shared_address(stage + i), at.k + i);
    for (int i = 16 * lane; i < v_bytes; i += 16 * 32)
      ptx::cp_async_16(ptx::shared_address(stage + k_bytes + i), at.v + i);
  }
};

/// A code c is dequantized as x = y * factor + offset with y = 1 + c / 2^bits. The float y needs no arithmetic, because
/// the code is the first bits of its fraction.
template <int kBits>
__device__ __forceinline__ float fraction(unsigned word, int first_bit) {
  constexpr unsigned kMask = (1u << kBits) - 1;
  constexpr int kPlace = 23 - kBits;
  const unsigned moved = first_bit <= kPlace ? word << (kPlace - first_bit) : word >> (first_bit - kPlace);
  return __uint_as_float((moved & kMask << kPlace) | 0x3F800000u);
}

/// Reads factors and offsets of a tile into shared memory [G, 16], tokens in the order of number_offset(): r, r + 8.
/// Both are 0 for tokens that are not seen, because the tile may hold anything there. All lanes of a warp call it.
__device__ __forceinline__ void read_params(const std::byte* tile, const TileSide& side, bool bfloat,
                                            const SeenTile& seen, float2* to, int lane) {
  const std::byte* at = tile + side.code_bytes();
  const int each = side.number_size * side.numbers, count = side.number_bytes() / each;
  const float levels = static_cast<float>(1 << side.bits);
  for (int i = lane; i < count; i += 32) {
    const GroupParams params(at + each * i, side, bfloat);
    const float factor = params.scale * levels;
    to[i] = seen.seen(i / 2 % 8 + i % 2 * 8) ? make_float2(factor, params.minimum() - factor) : make_float2(0.0f, 0.0f);
  }
  __syncwarp();
}

/// Three bits: where fraction() finds the codes of step 4 n + kStep, half w.
/// @param pair    word w of unit n's pair
/// @param single  the unit's third word, shifted to the right by 4 w
template <int kStep>
__device__ __forceinline__ unsigned three_bit_word(unsigned pair, unsigned single) {
  if constexpr (kStep == 2) return (pair >> 6 & 0x03030303u) | (single >> 1 & 0x04040404u);
  return kStep == 3 ? single : pair;
}
template <int kStep>
constexpr int kThreeBitShift = kStep == 1 ? 3 : 0;

__device__ __forceinline__ void add_products(const float (&x)[2][4], const float* q, int dim,
                                             float (&scores)[2][kHeads]) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const float4 y = *reinterpret_cast<const float4*>(q + h * dim);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      scores[r][h] = fmaf(x[r][0], y.x, fmaf(x[r][1], y.y, fmaf(x[r][2], y.z, fmaf(x[r][3], y.w, scores[r][h]))));
  }
}

/// Adds the lane's part of the scores of the tokens r and r + 8.
/// @param params  result of read_params()  @param q  [kHeads, D]
template <int kBits>
__device__ __forceinline__ void score_codes(const std::byte* tile, const TileSide& of, const float2* params,
                                            const float* q, int lane, float (&scores)[2][kHeads]) {
  TileSide side = of;
  side.bits = kBits;
  const int r = lane / 4, t = lane % 4;
  const GroupOfStep group_of(side);
  const auto word_of = [&](int i, int word) {
    return *reinterpret_cast<const unsigned*>(tile + key_code_offset(side, r + 8 * i, t, 4 * word));
  };
  // The codes of four channels from `channel` on are at bit `first` of each byte of both tokens' words.
  const auto add_four = [&](const unsigned(&words)[2], int first, int channel) {
    const float4 pair = *reinterpret_cast<const float4*>(params + group_of(channel / 32) * 16 + 2 * r);
    float x[2][4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[0][e] = fmaf(fraction<kBits>(words[0], 8 * e + first), pair.x, pair.y);
      x[1][e] = fmaf(fraction<kBits>(words[1], 8 * e + first), pair.z, pair.w);
    }
    add_products(x, q + channel, side.head_dim, scores);
  };
  if constexpr (kBits == 3) {
    const int units = side.units();
#pragma unroll 1
    for (int i = 0; i < 2 * units; ++i) {
      const int n = i / 2, w = i % 2, channel = 128 * n + 8 * t + 4 * w;
      const unsigned pair[2] = {word_of(0, i), word_of(1, i)},
                     single[2] = {word_of(0, 2 * units + n) >> 4 * w, word_of(1, 2 * units + n) >> 4 * w};
      const auto add_step = [&]<int kStep>() {
        const unsigned words[2] = {three_bit_word<kStep>(pair[0], single[0]),
                                   three_bit_word<kStep>(pair[1], single[1])};
        add_four(words, kThreeBitShift<kStep>, channel + 32 * kStep);
      };
      add_step.template operator()<0>();
      add_step.template operator()<1>();
      add_step.template operator()<2>();
      add_step.template operator()<3>();
    }
  } else {
    const int count = side.words();
#pragma unroll 1
    for (int w = 0; w < count; ++w) {
      const unsigned words[2] = {word_of(0, w), word_of(1, w)};
#pragma unroll
      for (int slice = 0; slice < 8 / kBits; ++slice)
        add_four(words, slice * kBits, code_channel(side, {t, 4 * w, slice}));
    }
  }
}

__device__ __forceinline__ void score_exact(const std::byte* tile, int dim, const float* q, int lane,
                                            float (&scores)[2][kHeads]) {
  const int r = lane / 4;
#pragma unroll 4
  for (int channel = lane % 4 * 8; channel < dim; channel += 32) {
    uint4 eight[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      eight[i] = __ldg(reinterpret_cast<const uint4*>(tile + exact_offset(dim, r + 8 * i, channel)));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned a = half ? eight[i].z : eight[i].x, b = half ? eight[i].w : eight[i].y;
        x[i][0] = __uint_as_float(a << 16), x[i][1] = __uint_as_float(a & 0xFFFF0000u);
        x[i][2] = __uint_as_float(b << 16), x[i][3] = __uint_as_float(b & 0xFFFF0000u);
      }
      add_products(x, q + channel + 4 * half, dim, scores);
    }
  }
}

/// Token of the lane's i-th value.
__device__ __forceinline__ int value_token(int lane, int i) { return 2 * (lane % 4) + i / 2 + 8 * (i % 2); }

__device__ __forceinline__ float weighted(const float (&x)[4], const float (&weights)[4], float sum) {
  return fmaf(x[0], weights[0], fmaf(x[1], weights[1], fmaf(x[2], weights[2], fmaf(x[3], weights[3], sum))));
}

/// Adds the lane's weighted values. @param params  result of read_params()
template <int kBits, int kMaxDim>
__device__ __forceinline__ void add_codes(const std::byte* tile, const TileSide& of, const float2* params,
                                          const float (&weights)[kHeads][4], int lane,
                                          float (&values)[kHeads][kMaxDim / 8]) {
  TileSide side = of;
  side.bits = kBits;
  const GroupOfStep group_of(side);
  float2 own[4];  // factors and offsets of the lane's tokens, which are adjacent: 2 u, 2 u + 8, 2 u + 1, 2 u + 9
  int loaded = -1;
  const auto word_of = [&](int h) {
    return *reinterpret_cast<const unsigned*>(tile + chunk_offset(side, lane, 4 * h));
  };
  // The codes of four tokens, for row lane / 4 + 8 * half of a block, are at bit `first` of each byte.
  const auto add_four = [&](unsigned word, int first, int block, int half) {
    const int group = group_of(value_step(side, block));
    if (group != loaded) {
      loaded = group;
      const float4* at = reinterpret_cast<const float4*>(params + group * 16 + lane % 4 * 4);
      const float4 one = at[0], other = at[1];
      own[0] = make_float2(one.x, one.y), own[1] = make_float2(one.z, one.w);
      own[2] = make_float2(other.x, other.y), own[3] = make_float2(other.z, other.w);
    }
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = fmaf(fraction<kBits>(word, 8 * i + first), own[i].x, own[i].y);
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      float& sum = values[head][2 * block + half];
      sum = weighted(x, weights[head], sum);
    }
  };
  if constexpr (kBits == 3) {
    const int units = side.units();
#pragma unroll
    for (int n = 0; n < kMaxDim / 128; ++n) {
      if (n >= units) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned both = word_of(2 * (2 * units + n) + half);
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          const unsigned pair = word_of(2 * (2 * n + w) + half), single = both >> 4 * w;
          const auto add_step = [&]<int kStep>() {
            add_four(three_bit_word<kStep>(pair, single), kThreeBitShift<kStep>, 2 * (4 * n + kStep) + w, half);
          };
          add_step.template operator()<0>();
          add_step.template operator()<1>();
          add_step.template operator()<2>();
          add_step.template operator()<3>();
        }
      }
    }
  } else {
    constexpr int kSlices = 8 / kBits, kMostWords = kMaxDim / 8 / kSlices;
#pragma unroll
    for (int h = 0; h < kMostWords; ++h) {
      if (h >= 2 * side.words()) break;
      const unsigned word = word_of(h);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) add_four(word, slice * kBits, h / 2 * kSlices + slice, h % 2);
    }
  }
}

template <int kMaxDim>
__device__ __forceinline__ void add_exact(const std::byte* tile, int dim, const SeenTile& seen,
                                          const float (&weights)[kHeads][4], int lane,
                                          float (&values)[kHeads][kMaxDim / 8]) {
#pragma unroll
  for (int a = 0; a < kMaxDim / 8; ++a) {
    if (8 * a >= dim) break;
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = value_token(lane, i);
      x[i] = 0.0f;
      if (seen.seen(token))
        x[i] = __bfloat162float(
            *reinterpret_cast<const __nv_bfloat16*>(tile + exact_offset(dim, token, 8 * a + lane / 4)));
    }
#pragma unroll
    for (int head = 0; head < kHeads; ++head) values[head][a] = weighted(x, weights[head], values[head][a]);
  }
}

/// A warp's online softmax. Lane 4 r + t has the largest score of head t, and head t's sum over the tokens r and r + 8.
template <int kMaxDim>
struct Softmax {
  static_assert(kHeads == 4, "as many as lanes that share a token");
  float largest = kMinusInf, sum = 0.0f;
  float values[kHeads][kMaxDim / 8] = {};  ///< over the lane's tokens, for the lane's permuted channels

  /// Adds a tile's scores and computes the weights of the lane's values.
  /// @param scores  base 2; the sum over the four lanes of a token is the score
  /// @param center  base-2 score of the center with head lane % 4, for capped scores
  __device__ __forceinline__ void add_scores(const float (&scores)[2][kHeads], const SeenTile& tile, float softcap,
                                             float center, int lane, float (&weights)[kHeads][4]) {
    // The four lanes of a token sum their parts; each lane gets the sum of one head.
    float weight[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float half[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float even = scores[i][2 * j], odd = scores[i][2 * j + 1];
        half[j] = (lane & 1 ? odd : even) + __shfl_xor_sync(kAll, lane & 1 ? even : odd, 1);
      }
      weight[i] = (lane & 2 ? half[1] : half[0]) + __shfl_xor_sync(kAll, lane & 2 ? half[0] : half[1], 2);
      if (softcap > 0.0f) weight[i] = capped(weight[i] + center, softcap * kLog2e);
      if (!tile.seen(lane / 4 + 8 * i)) weight[i] = kMinusInf;
    }
    float most = fmaxf(largest, fmaxf(weight[0], weight[1]));
#pragma unroll
    for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, step));
    if (__any_sync(kAll, most > largest)) {
      const float keep = ptx::ex2(largest - most);
      sum *= keep;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float of_head = __shfl_sync(kAll, keep, h);
#pragma unroll
        for (float& value : values[h]) value *= of_head;
      }
      largest = most;
    }
    const float reference = largest == kMinusInf ? 0.0f : largest;  // masks may hide all tokens so far
#pragma unroll
    for (float& x : weight) x = ptx::ex2(x - reference);
    sum += weight[0] + weight[1];
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[h][i] = __shfl_sync(kAll, weight[i % 2], 4 * (value_token(lane, i) % 8) + h);
  }
  /// Sums over the lanes. @param to  [kHeads, dim] by permuted channel  @param states  [kHeads] largest score and sum
  __device__ __forceinline__ void leave(float* to, float2* states, int dim, int lane) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
    // A result without any score is left out of merges. One whose scores are all NaN must not be.
    if (sum != sum && largest == kMinusInf) largest = 0.0f;
    if (lane < kHeads) states[lane] = make_float2(largest, sum);
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
#pragma unroll
      for (int a = 0; a < kMaxDim / 8; ++a) {
        float value = values[h][a];
        value += __shfl_xor_sync(kAll, value, 1);
        value += __shfl_xor_sync(kAll, value, 2);
        if (lane % 4 == a % 4 && 8 * a < dim) to[h * dim + 8 * a + lane / 4] = value;
      }
  }
};

}  // namespace kvq::generic
