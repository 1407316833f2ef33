#pragma once

#include <kvq/runtime/kernels/common/format.h>
#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/runtime/kernels/common/generic_tiles.cuh>
#include <kvq/runtime/kernels/common/unit_values.cuh>

/// Coded rows of tiles as floats: x_hat of packing.md in the basis of x @ A, with the row's centroid.
namespace kvq::generic {

/// Whether a side's rows are decoded before anything else is done with them: those of bit tiles, and all rows with
/// centroids.
KVQ_HD constexpr bool decodes_rows(const TileSide& side) { return side.is_bits() || side.index_bytes > 0; }
KVQ_HD constexpr bool decodes_rows(const CacheFormat& format) {
  return decodes_rows(format.k) || decodes_rows(format.v);
}

/// Memory of decode_rows() for the rows of a tile: their words, one word more each, and their codes.
KVQ_HD constexpr int scratch_words(const TileSide& side) { return side.is_bits() ? side.row_words + 1 : 0; }
KVQ_HD constexpr int scratch_bytes(const TileSide& side) {
  return side.is_bits() ? kTileTokens * (4 * scratch_words(side) + side.head_dim) : 0;
}
constexpr int kMostScratchBytes = scratch_bytes({kGenericHeadDim, 0, 1, 1, 4, false, kGenericHeadDim / 4});

/// One side's tiles of one KV head.
struct CodedSide {
  const TileSide& side;
  const RowCode& code;
  bool bfloat, value;
  int head;
};

/// Calls action(token) for the tokens of a set.
template <typename Action>
__device__ __forceinline__ void for_tokens(unsigned tokens, const Action& action) {
  for (; tokens; tokens &= tokens - 1) action(__ffs(static_cast<int>(tokens)) - 1);
}

/// Reads a token of a code tile. All lanes of a warp call it.
__device__ __forceinline__ void read_codes(const std::byte* tile, const TileSide& side, bool bfloat, bool value,
                                           int token, float* row, int lane) {
  const GroupOfStep group_of(side);
  const auto byte_at = [&](int piece, int byte) {
    return static_cast<unsigned>(
        tile[value ? value_code_offset(side, token, piece, byte) : key_code_offset(side, token, piece, byte)]);
  };
  const auto put = [&](int channel, unsigned code) {
    const GroupParams params(tile + number_offset(side, token, group_of(channel / 32), 0), side, bfloat);
    row[channel] = params.value(static_cast<float>(code));
  };
  if (side.bits == 3) {
    for (int channel = lane; channel < side.head_dim; channel += 32) {
      const CodeParts parts = code_parts(side, channel);
      const auto bits_of = [&](const BitField& field) {
        return byte_at(parts.lane, field.byte) >> field.shift & ((1u << field.width) - 1);
      };
      put(channel, bits_of(parts.low) | (parts.high.width ? bits_of(parts.high) << parts.low.width : 0u));
    }
    return;
  }
  const int piece_bytes = side.piece_bytes();
  for (int i = lane; i < 4 * piece_bytes; i += 32) {
    const int piece = i / piece_bytes, byte = i % piece_bytes;
    const unsigned all = byte_at(piece, byte);
    for (int slice = 0; slice < side.codes_per_byte(); ++slice)
      put(code_channel(side, {piece, byte, slice}), all >> (slice * side.bits) & ((1u << side.bits) - 1));
  }
}

/// The words of tokens of a bit tile, in the order of the row. Word W of each is 0.
/// @param words  [16, W + 1]
__device__ __forceinline__ void read_words(const std::byte* tile, const CodedSide& of, unsigned tokens, unsigned* words,
                                           int lane) {
  const TileSide& side = of.side;
  const int each = scratch_words(side);
  for (int w = lane; w < side.row_words; w += 32) {
    if (of.value) {
      int offsets[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) offsets[i] = value_byte_offset(side, 0, 4 * w + i);
      // The bytes of a token's row lie as those of token 0, so many bytes behind them.
      for_tokens(tokens, [&](int token) {
        const std::byte* at = tile + (value_byte_offset(side, token, 4 * w) - offsets[0]);
        unsigned word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) word |= static_cast<unsigned>(at[offsets[i]]) << 8 * i;
        words[token * each + w] = word;
      });
    } else {
      for_tokens(tokens, [&](int token) {
        words[token * each + w] = *reinterpret_cast<const unsigned*>(tile + key_word_offset(side, token, w));
      });
    }
  }
  if (lane < kTileTokens && tokens >> lane & 1u) words[lane * each + side.row_words] = 0;
}

/// Bits [first, first + count) of a row.
__device__ __forceinline__ unsigned bits_at(const unsigned* words, int first, int count) {
  return __funnelshift_r(words[first / 32], words[first / 32 + 1], static_cast<unsigned>(first % 32)) &
         ((1u << count) - 1);
}

/// A channel's code (key_bit(), value_bit()). @param channel  in the segment
__device__ __forceinline__ unsigned code_at(const unsigned* words, const BitSegment& place, bool value, int channel) {
  const int unit = channel / kUnitChannels * kUnitChannels, q = channel - unit,
            m = min(place.channels - unit, kUnitChannels), begin = place.first_bit + unit * place.bits;
  unsigned code = 0;
  if (value) {
    for (int width = 8, first = 0; width > 0; width /= 2) {
      if (!(place.bits & width)) continue;
      code |= bits_at(words, begin + first * m + q * width, width) << first;
      first += width;
    }
  } else {
    for (int i = 0; i < place.bits; ++i) {
      const int at = begin + i * m + q;
      code |= (words[at / 32] >> at % 32 & 1u) << i;
    }
  }
  return code;
}

/// Decodes tokens of a bit tile. All lanes of a warp call it. @param scratch  scratch_bytes(), of all 16 tokens
__device__ __forceinline__ void decode_bits(const std::byte* tile, const CodedSide& of, unsigned tokens, float* rows,
                                            int stride, std::byte* scratch, int lane) {
  const TileSide& side = of.side;
  const HeadRows& head = of.code.heads[of.head];
  const int each = scratch_words(side), num_segments = head.num_segments;
  unsigned* words = reinterpret_cast<unsigned*>(scratch);
  std::uint8_t* codes = reinterpret_cast<std::uint8_t*>(words + kTileTokens * each);
  const auto number = [&](int token, int i) {
    return number_at(tile + number_offset(side, token, 0, i), side, of.bfloat);
  };
  read_words(tile, of, tokens, words, lane);
  // Channels of no segment, the last ones: 0, or NaN in a poisoned row.
  const int coded = num_segments ? head.segments[num_segments - 1].place.first_channel +
                                       head.segments[num_segments - 1].place.channels
                                 : 0;
  for (int c = coded + lane; c < side.head_dim; c += 32)
    for_tokens(tokens, [&](int token) {
      const float scale = num_segments ? number(token, 0) : 0.0f;
      rows[token * stride + c] = scale == scale ? 0.0f : scale;
    });
  __syncwarp();
  for (int s = 0; s < num_segments; ++s) {
    const RowSegment segment = head.segments[s];
    const BitSegment& place = segment.place;
    const int count = segment.group_size;
    // A value of a trellis depends on the codes before its own.
    if (segment.kind == CodeKind::trellis) {
      for (int c = lane; c < place.channels; c += 32)
        for_tokens(tokens, [&](int token) {
          codes[token * side.head_dim + place.first_channel + c] =
              static_cast<std::uint8_t>(code_at(words + token * each, place, of.value, c));
        });
      __syncwarp();
    }
    for (int c = lane; c < place.channels; c += 32) {
      const int group = c / count, channel = place.first_channel + c, first_number = segment.first_number;
      for_tokens(tokens, [&](int token) {
        float& x = rows[token * stride + channel];
        if (segment.kind == CodeKind::trellis) {
          const std::uint8_t* of_group = codes + token * side.head_dim + place.first_channel + group * count;
          x = unit_value(segment, of.code.tables, of_group, count, c - group * count);
        } else {
          const auto code = static_cast<std::uint8_t>(code_at(words + token * each, place, of.value, c));
          if (segment.kind == CodeKind::affine) {
            const float scale = number(token, first_number + group),
                        second = number(token, head.groups + first_number + group);
            x = side.integer_zero ? __fmul_rn(__fsub_rn(static_cast<float>(code), second), scale)
                                  : __fadd_rn(__fmul_rn(static_cast<float>(code), scale), second);
            return;
          }
          // A scale of a group of symmetric codes has the step in it.
          x = segment.kind == CodeKind::symmetric && !of.code.one_scale
                  ? __fmul_rn(static_cast<float>(2 * static_cast<int>(code) - (1 << place.bits) + 1), 0.5f)
                  : unit_value(segment, of.code.tables, &code, 1, 0);
        }
        x = of.code.one_scale ? __fmul_rn(number(token, 0), __fmul_rn(segment.gain, x))
                              : __fmul_rn(number(token, first_number + group), x);
      });
    }
  }
}

/// Decodes tokens of a tile that is not exact. All lanes of a warp call it and may read the rows behind a __syncwarp().
/// @param tokens   bit i: token i; other rows keep what they hold
/// @param rows     [16] of D floats, by channel, `stride` floats apart
/// @param scratch  scratch_bytes(); parts of other tokens are not touched
__device__ __forceinline__ void decode_rows(const std::byte* tile, const CodedSide& of, unsigned tokens, float* rows,
                                            int stride, std::byte* scratch, int lane) {
  if (of.side.is_bits())
    decode_bits(tile, of, tokens, rows, stride, scratch, lane);
  else
    for_tokens(tokens,
               [&](int token) { read_codes(tile, of.side, of.bfloat, of.value, token, rows + token * stride, lane); });
  if (of.side.index_bytes == 0) return;
  __syncwarp();
  const int dim = of.side.head_dim;
  for_tokens(tokens, [&](int token) {
    const std::int64_t entry = static_cast<std::int64_t>(of.code.per_head ? of.head : 0) * of.code.num_centroids +
                               load_index(of.side, tile, token, of.code.num_centroids);
    const float* centroid = of.code.rotated_centroids + entry * dim;
    for (int c = lane; c < dim; c += 32) rows[token * stride + c] += __ldg(centroid + c);
  });
}

}  // namespace kvq::generic
