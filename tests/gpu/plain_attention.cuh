#pragma once

#include "case_windows.cuh"

#include <kvq/plan/segment_layout.h>
#include <kvq/plan/table_layout.h>
#include <kvq/runtime/kernels/decode/params.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

/// Reference decode attention in plain loops, from the same bytes. In double it gives the expected results. In float it
/// gives the rounding error that is allowed; there, queries for coded keys are rounded as in the tuned kernels. So are
/// weights of coded values if channels have scales, which may multiply the error of a weight by the ratio of two
/// scales.
namespace kvq::plain {

template <typename Float>
__device__ Float number_at(const std::byte* at, bool bfloat) {
  const unsigned short bits = *reinterpret_cast<const unsigned short*>(at);
  return static_cast<Float>(bfloat ? __bfloat162float(__ushort_as_bfloat16(bits))
                                   : __half2float(__ushort_as_half(bits)));
}

/// A number of a group of codes.
template <typename Float>
__device__ Float group_number(const std::byte* at, const TileSide& side, bool bfloat) {
  return side.number_size == 4 ? static_cast<Float>(*reinterpret_cast<const float*>(at)) : number_at<Float>(at, bfloat);
}

/// Code of one channel of a coded token.
__device__ inline int code_of(const TileSide& side, bool is_value, const std::byte* tile, int token, int channel) {
  const CodeParts parts = code_parts(side, channel);
  const auto bits_of = [&](const BitField& field) {
    const int offset = is_value ? value_code_offset(side, token, parts.lane, field.byte)
                                : key_code_offset(side, token, parts.lane, field.byte);
    return static_cast<int>(tile[offset]) >> field.shift & ((1 << field.width) - 1);
  };
  return bits_of(parts.low) | (parts.high.width ? bits_of(parts.high) << parts.low.width : 0);
}
/// Scale (`number` 0), or minimum or zero point (1), of a channel's group.
template <typename Float>
__device__ Float number_of(const TileSide& side, bool bfloat, const std::byte* tile, int token, int channel,
                           int number) {
  return group_number<Float>(tile + number_offset(side, token, channel / side.group_size, number), side, bfloat);
}

/// x_hat_rot of one channel of a coded token.
template <typename Float>
__device__ Float coded_value(const TileSide& side, bool is_value, bool bfloat, const std::byte* tile, int token,
                             int channel) {
  if (side.exact()) return number_at<Float>(tile + exact_offset(side.head_dim, token, channel), true);
  const int code = code_of(side, is_value, tile, token, channel);
  const auto number = [&](int i) { return number_of<Float>(side, bfloat, tile, token, channel, i); };
  const Float scale = number(0);
  if (side.integer_zero) return (static_cast<Float>(code) - number(1)) * scale;
  if (side.numbers == 2) return static_cast<Float>(code) * scale + number(1);
  return scale * (static_cast<Float>(2 * code - (1 << side.bits) + 1) / 2);
}

/// The tile of a position that lies in pages.
__device__ inline const std::byte* tile_of(const DecodeParams& p, const PageLayout& layout, int b, int head,
                                           int position, bool is_value) {
  const std::int64_t base = p.cache.page_indptr ? p.cache.page_indptr[b] : b * p.cache.page_table_stride;
  const std::int64_t page = p.cache.page_table[base + position / layout.page_size];
  const int slot = position % layout.page_size;
  return p.cache.pages + page * p.cache.page_stride +
         (is_value ? layout.value_tile(head, slot) : layout.key_tile(head, slot));
}

/// A channel of the centroid that a token's index is of, or 0.
template <typename Float>
__device__ Float centroid_value(const RowCode& code, const TileSide& side, const std::byte* tile, int head, int token,
                                int channel) {
  if (side.index_bytes == 0) return Float(0);
  const int index = min(static_cast<int>(tile[index_offset(side, token)]), code.num_centroids - 1);
  const std::int64_t row = static_cast<std::int64_t>(code.per_head ? head : 0) * code.num_centroids + index;
  return static_cast<Float>(code.rotated_centroids[row * side.head_dim + channel]);
}

template <typename Float>
__device__ Float stored_value(const DecodeParams& p, const PageLayout& layout, bool bfloat_k, bool bfloat_v, int b,
                              int head, int position, int channel, bool is_value) {
  const SequenceTokens tokens = test::case_tokens(p.cache, b);
  if (tokens.is_exact(position))
    return number_at<Float>((position < tokens.sink_end ? p.cache.sinks : p.cache.rings) +
                                test::case_window_offset(p.cache, tokens, b, head, position, channel, is_value),
                            true);
  const TileSide& side = is_value ? layout.v : layout.k;
  const std::byte* tile = tile_of(p, layout, b, head, position, is_value);
  const int token = position % kTileTokens;
  return coded_value<Float>(side, is_value, is_value ? bfloat_v : bfloat_k, tile, token, channel) +
         centroid_value<Float>(is_value ? p.cache.code_v : p.cache.code_k, side, tile, head, token, channel);
}

template <typename Float>
__device__ void rotate_plain(Float* row, Float* scratch, const DeviceRotation& rotation, int head, int dim,
                             bool transposed) {
  const int entry = rotation.per_head ? head : 0;
  for (int c = static_cast<int>(threadIdx.x); c < dim; c += static_cast<int>(blockDim.x)) {
    Float sum = row[c];
    if (rotation.matrix) {
      sum = 0;
      for (int k = 0; k < dim; ++k)
        sum += row[k] * static_cast<Float>(rotation.matrix[(static_cast<std::int64_t>(entry) * dim + k) * dim + c]);
    } else if (rotation.order >= 1) {
      sum = 0;
      const int first = c / rotation.order * rotation.order;
      for (int k = first; k < first + rotation.order; ++k) {
        const int at = entry * dim + (transposed ? c : k);
        const Float sign = rotation.factors ? static_cast<Float>(rotation.factors[at])
                           : rotation.signs ? static_cast<Float>(rotation.signs[at])
                                            : Float(1);
        sum += row[k] * sign * (__popc((k - first) & (c - first)) & 1 ? Float(-1) : Float(1));
      }
      sum /= sqrt(static_cast<Float>(rotation.order));
    }
    scratch[c] = sum;
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < dim; c += static_cast<int>(blockDim.x)) row[c] = scratch[c];
  __syncthreads();
}

/// Rounds a rotated query to integers of its largest channel: the step is largest / most.
template <typename Float>
__device__ void round_query(Float* row, int dim, Float most) {
  Float largest = 0;
  for (int c = 0; c < dim; ++c) largest = max(largest, abs(row[c]));
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < dim; c += static_cast<int>(blockDim.x))
    if (largest > 0) row[c] = rint(row[c] * (most / largest)) * (largest / most);
  __syncthreads();
}

constexpr int kMostRowBits = 1024;
constexpr float kQuery = 32512;       ///< largest integer of a query: 127 * 256
constexpr float kLinearQuery = 8191;  ///< largest integer of a query for linear rows, of DecodeTraits::kPlanes bits

/// Numbers that a row of a side in bit tiles is linear in: its bits, of codebook codes x of all odd sets, of segments
/// the levels of the channels of all units.
__host__ __device__ inline int linear_bits(const TileSide& side) {
  if (side.segments) return kMostUnitChannels;
  return 32 * (side.table_bits > 0 ? table_words(side.table_bits) : side.row_words);
}

/// Theta [Hkv, D, linear_bits()] of the rows in bit tiles of both sides, else null.
struct PlainBases {
  const float *k = nullptr, *v = nullptr;
  const SegmentProgram* programs = nullptr;  ///< [Hkv] of keys with `segments`
};

/// A query for the bits of linear keys: q Theta. @param scratch  [kMostRowBits]
template <typename Float>
__device__ void query_of_bits(const Float* row, Float* scratch, const float* basis, int head, const TileSide& side) {
  const int bits = linear_bits(side);
  for (int x = static_cast<int>(threadIdx.x); x < bits; x += static_cast<int>(blockDim.x)) {
    Float sum = 0;
    for (int c = 0; c < side.head_dim; ++c)
      sum += row[c] * static_cast<Float>(basis[(static_cast<std::int64_t>(head) * side.head_dim + c) * bits + x]);
    scratch[x] = sum;
  }
  __syncthreads();
}
/// Number x of linear_bits() of a row: +1/2 or -1/2, or a level.
template <typename Float>
__device__ Float row_bit(const TileSide& side, bool is_value, const std::byte* tile, int token, int x,
                         const SegmentProgram* program = nullptr) {
  const auto stored = [&](int bit) {
    const int offset =
        is_value ? value_byte_offset(side, token, bit / 8) : key_word_offset(side, token, bit / 32) + bit % 32 / 8;
    return static_cast<int>(tile[offset]) >> bit % 8 & 1;
  };
  int bit = 0;
  if (side.segments) {
    const SegmentUnit& unit = program->units[x / kUnitChannels];
    const int channel = x % kUnitChannels;
    if (x / kUnitChannels >= program->num_units || channel >= unit.channels) return 0;
    int code = 0;
    for (int i = 0; i < unit.bits; ++i) code |= stored(unit.first_bit + i * unit.channels + channel) << i;
    return static_cast<Float>(static_cast<std::int8_t>(unit.levels[code / 4] >> 8 * (code % 4)));
  }
  if (side.table_bits > 0) {
    const BitSegment all{side.table_bits, 0, side.head_dim, 0};
    const TableWord word = table_word(side.table_bits, x / 32);
    for (int i = 0; i < side.table_bits; ++i)
      if (odd_set(side.table_bits, word.set) >> i & 1)
        bit ^= stored((is_value ? value_bit : key_bit)(all, 32 * word.unit + x % 32, i));
  } else {
    bit = stored(x);
  }
  return bit ? Float(0.5) : Float(-0.5);
}

/// A new token of a call.
struct PlainToken {
  int sequence, number, count;  ///< `number` of `count` new tokens of the sequence
};
__device__ inline PlainToken plain_token(const DecodeParams& p, int token) {
  if (!p.q_indptr) return {token, 0, 1};
  int b = 0;
  while (p.q_indptr[b + 1] <= token) ++b;
  return {b, token - p.q_indptr[b], p.q_indptr[b + 1] - p.q_indptr[b]};
}
/// First position that some query of a sequence sees, and one past the last.
__device__ inline PositionRange plain_range(const DecodeParams& p, int b) {
  const int length = p.cache.seq_lens[b], n = p.q_indptr ? p.q_indptr[b + 1] - p.q_indptr[b] : 1;
  return {max(p.first ? p.first[b] : 0, p.sliding_window > 0 ? length - n + 1 - p.sliding_window : 0),
          min(p.last ? p.last[b] : length, length)};
}
__device__ inline bool plain_sees(const DecodeParams& p, int token, const PlainToken& of, int position) {
  const int length = p.cache.seq_lens[of.sequence], own = length - of.count + of.number;
  if (position >= length || (p.first && position < p.first[of.sequence]) || (p.last && position >= p.last[of.sequence]))
    return false;
  if (p.sliding_window > 0 && position <= own - p.sliding_window) return false;
  if (position < length - of.count || !p.token_masks) return position <= own;
  return p.token_masks[token] >> (position - (length - of.count)) & 1;
}

/// Formats that tuned kernels may have.
__device__ inline bool has_tuned_weights(const TileSide& side) {
  return (side.bits == 2 || side.bits == 4) && side.number_size == 2 && !side.integer_zero;
}
/// What a channel of the weighted sum of coded values gains by the rounding of weights to 16-bit integers, relative to
/// the largest weight of a stage, which has 64 tokens at most. @param exponentials  of each position
template <typename Float>
__device__ Float weight_error(const DecodeParams& p, const PageLayout& layout, bool bfloat, int token,
                              const PlainToken& of, int head, int channel, const Float* exponentials) {
  constexpr int kStage = 64;
  constexpr Float kLargest = 65534, kLeast = 1e-30f;  // as in the tuned kernels
  const SequenceTokens tokens = test::case_tokens(p.cache, of.sequence);
  const int length = p.cache.seq_lens[of.sequence];
  const auto weight = [&](int t) {
    if (tokens.is_exact(t) || !plain_sees(p, token, of, t)) return Float(0);
    return exponentials[t] * number_of<Float>(layout.v, bfloat, tile_of(p, layout, of.sequence, head, t, true),
                                              t % kTileTokens, channel, 0);
  };
  Float error = 0;
  for (int first = 0; first < length; first += kStage) {
    const int end = min(length, first + kStage);
    Float largest = kLeast;
    for (int t = first; t < end; ++t) largest = max(largest, weight(t));
    for (int t = first; t < end; ++t) {
      const Float w = weight(t);
      if (w > 0)
        error += (rint(w * (kLargest / largest)) * (largest / kLargest) - w) *
                 static_cast<Float>(
                     code_of(layout.v, true, tile_of(p, layout, of.sequence, head, t, true), t % kTileTokens, channel));
    }
  }
  return error;
}

/// Grid [T, num_q_heads]; kPlainThreads threads; out [T, Hq, D], lse [T, Hq]. @param scores  [T, Hq, max_length]
template <typename Float, typename Activation>
__global__ void plain_decode(DecodeParams p, PageLayout layout, PlainBases bases, bool bfloat_k, bool bfloat_v,
                             Float* scores, int max_length, Float* out, Float* lse) {
  const int dim = layout.k.head_dim, v_dim = layout.v.head_dim;
  __shared__ Float row[256], scratch[256], reduce[test::kPlainThreads];
  const int token = static_cast<int>(blockIdx.x), query_head = static_cast<int>(blockIdx.y),
            thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int head = query_head / (p.num_q_heads / p.cache.num_kv_heads);
  const PlainToken of = plain_token(p, token);
  const int b = of.sequence, length = p.cache.seq_lens[b];
  const Activation* q = static_cast<const Activation*>(p.q) + token * p.q_stride + query_head * dim;
  Float shift = 0;
  for (int c = 0; c < dim; ++c)
    if (p.cache.center_k)
      shift += static_cast<Float>(static_cast<float>(q[c])) * static_cast<Float>(p.cache.center_k[head * dim + c]);
  shift *= static_cast<Float>(p.softmax_scale);
  const Float cap = static_cast<Float>(p.logit_softcap), center = shift;
  if (cap > 0) shift = 0;  // capped scores include the center
  for (int c = thread; c < dim; c += threads) row[c] = static_cast<Float>(static_cast<float>(q[c]));
  __syncthreads();
  rotate_plain(row, scratch, p.cache.rotation_k, head, dim, false);
  __shared__ Float bits_of_query[kMostRowBits], sums_of_bits[kMostRowBits];
  const bool linear = layout.k.is_bits();
  if (linear) query_of_bits(row, bits_of_query, bases.k, head, layout.k);
  if (std::is_same_v<Float, float> && linear)
    round_query(bits_of_query, linear_bits(layout.k), Float(layout.k.segments ? kQuery : kLinearQuery));
  if (std::is_same_v<Float, float> && !linear && !layout.k.exact()) round_query(row, dim, Float(kQuery));
  Float* mine = scores + (static_cast<std::int64_t>(token) * p.num_q_heads + query_head) * max_length;
  bool any = false;
  for (int t = 0; t < length; ++t) any = any || plain_sees(p, token, of, t);
  Float largest = p.sink_logits ? static_cast<Float>(p.sink_logits[query_head]) - shift : -INFINITY;
  for (int t = thread; t < length; t += threads) {
    mine[t] = -INFINITY;
    if (!plain_sees(p, token, of, t)) continue;
    Float sum = 0;
    if (linear && !test::case_tokens(p.cache, b).is_exact(t)) {
      const std::byte* tile = tile_of(p, layout, b, head, t, false);
      const SegmentProgram* program = bases.programs ? bases.programs + head : nullptr;
      for (int number = 0; number < layout.k.numbers; ++number) {
        Float of_number = 0;  // of the bits that the scale belongs to
        for (int x = 0; x < linear_bits(layout.k); ++x)
          if (!program || program->units[x / kUnitChannels].scale == number)
            of_number += bits_of_query[x] * row_bit<Float>(layout.k, false, tile, t % kTileTokens, x, program);
        sum += of_number * number_of<Float>(layout.k, bfloat_k, tile, t % kTileTokens, 0, number);
      }
    } else
      for (int c = 0; c < dim; ++c)
        sum += row[c] * stored_value<Float>(p, layout, bfloat_k, bfloat_v, b, head, t, c, false);
    mine[t] = sum * static_cast<Float>(p.softmax_scale);
    if (cap > 0) mine[t] = cap * tanh((mine[t] + center) / cap);
    largest = max(largest, mine[t]);
  }
  reduce[thread] = largest;
  __syncthreads();
  for (int i = 0; i < threads; ++i) largest = max(largest, reduce[i]);
  for (int t = thread; t < length; t += threads) mine[t] = mine[t] > -INFINITY ? exp(mine[t] - largest) : Float(0);
  __syncthreads();
  Float sum = p.sink_logits && largest > -INFINITY
                  ? exp(static_cast<Float>(p.sink_logits[query_head]) - shift - largest)
                  : Float(0);
  Float tokens = 0;  // sum of exponentials without the learned sink
  for (int t = 0; t < length; ++t) tokens += mine[t];
  sum += tokens;
  const bool rounds = std::is_same_v<Float, float> && p.cache.rotation_v.factors && has_tuned_weights(layout.v);
  if (linear) {
    for (int x = thread; x < linear_bits(layout.v); x += threads) {
      sums_of_bits[x] = 0;
      for (int t = 0; t < length; ++t) {
        if (!plain_sees(p, token, of, t) || test::case_tokens(p.cache, b).is_exact(t)) continue;
        const std::byte* tile = tile_of(p, layout, b, head, t, true);
        sums_of_bits[x] += mine[t] * number_of<Float>(layout.v, bfloat_v, tile, t % kTileTokens, 0, 0) *
                           row_bit<Float>(layout.v, true, tile, t % kTileTokens, x);
      }
    }
    __syncthreads();
  }
  for (int c = thread; c < v_dim; c += threads) {
    Float value = 0;
    for (int x = 0; linear && x < linear_bits(layout.v); ++x)
      value += sums_of_bits[x] *
               static_cast<Float>(bases.v[(static_cast<std::int64_t>(head) * v_dim + c) * linear_bits(layout.v) + x]);
    for (int t = 0; t < length; ++t)
      if (plain_sees(p, token, of, t) && (!linear || test::case_tokens(p.cache, b).is_exact(t)))
        value += mine[t] * stored_value<Float>(p, layout, bfloat_k, bfloat_v, b, head, t, c, true);
    if (rounds) value += weight_error<Float>(p, layout, bfloat_v, token, of, head, c, mine);
    row[c] = any ? value / sum : Float(0);
  }
  __syncthreads();
  rotate_plain(row, scratch, p.cache.rotation_v, head, v_dim, true);
  for (int c = thread; c < v_dim; c += threads)
    out[(static_cast<std::int64_t>(token) * p.num_q_heads + query_head) * v_dim + c] =
        row[c] +
        (p.cache.center_v && any ? tokens / sum * static_cast<Float>(p.cache.center_v[head * v_dim + c]) : Float(0));
  if (thread == 0 && lse)
    lse[token * p.num_q_heads + query_head] = any || p.sink_logits ? largest + log(sum) + shift : -INFINITY;
}

}  // namespace kvq::plain
