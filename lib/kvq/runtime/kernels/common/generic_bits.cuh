#pragma once

#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/runtime/kernels/common/generic_rows.cuh>
#include <kvq/runtime/kernels/common/generic_trellis.cuh>
#include <kvq/runtime/kernels/common/unit_values.cuh>

/// From rotated rows in shared memory to rows in bit tiles, and the choice of centroids, as packing.md says; a warp
/// takes a row at a time.
namespace kvq::generic {

constexpr int kMostRowWords = kGenericHeadDim * 8 / 32;

/// Shared memory of one warp that quantizes rows of bits.
struct BitRow {
  float* y;             ///< [D] channels with the scale left out, then unit values
  std::uint8_t* codes;  ///< [D]
  unsigned* words;      ///< [kMostRowWords] the row
  float* costs;         ///< of TrellisSearch
  std::uint8_t* survivors;
};

/// tree() of packing.md. All lanes of a warp call it and get the sum. @param term  i -> float, i < count
template <typename Term>
__device__ __forceinline__ float tree_of(int count, Term term, int lane) {
  int width = 1;
  while (width < count) width *= 2;
  const int each = max(1, width / 32);  // neighbors of a lane
  float y[kMostEach];
#pragma unroll
  for (int i = 0; i < kMostEach; ++i) {
    const int at = lane * each + i;
    y[i] = i < each && at < count ? term(at) : 0.0f;
  }
  const float two = __fadd_rn(y[0], y[1]), four = __fadd_rn(two, __fadd_rn(y[2], y[3])),
              eight = __fadd_rn(four, __fadd_rn(__fadd_rn(y[4], y[5]), __fadd_rn(y[6], y[7])));
  float sum = each == 1 ? y[0] : each == 2 ? two : each == 4 ? four : eight;
  for (int step = 1; step < min(32, width); step *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kAll, sum, step));
  return __shfl_sync(kAll, sum, 0);
}

/// Codes of y, with the scale left out. All lanes of a warp call it.
__device__ __forceinline__ void search_codes(const RowSegment& segment, const float* tables, const BitRow& row,
                                             int count, std::uint8_t* codes, int lane) {
  const int bits = segment.place.bits;
  const float* table = tables + segment.table;
  if (segment.kind == CodeKind::trellis) {
    search_trellis({table, bits, segment.memory, row.costs, row.survivors}, row.y, count, codes, lane);
    return;
  }
  for (int c = lane; c < count; c += 32) {
    int code = 0;
    if (segment.kind == CodeKind::codebook) {
      const float* thresholds = table + (1 << bits);
      for (int i = 0; i < (1 << bits) - 1; ++i) code += thresholds[i] <= row.y[c];
    } else {
      const float edge = static_cast<float>(1 << (bits - 1)),
                  quotient = floorf(__fdiv_rn(row.y[c], gaussian_step(bits)));
      code = static_cast<int>(fminf(fmaxf(quotient, -edge), edge - 1.0f)) + (1 << (bits - 1));
    }
    codes[c] = static_cast<std::uint8_t>(code);
  }
  __syncwarp();
}

/// row.y = the unit values of codes. All lanes of a warp call it.
__device__ __forceinline__ void take_unit_values(const RowSegment& segment, const float* tables, const BitRow& row,
                                                 int count, const std::uint8_t* codes, int lane) {
  for (int c = lane; c < count; c += 32) row.y[c] = unit_value(segment, tables, codes, count, c);
  __syncwarp();
}

/// Quantizes a group with a codebook or trellis that has a scale of its own. @return  the scale's bits
__device__ __forceinline__ unsigned encode_searched(const float* x, const RowSegment& segment, const float* tables,
                                                    ScaleRule rule, const TileSide& side, bool bfloat,
                                                    const BitRow& row, std::uint8_t* codes, int lane) {
  const int count = segment.group_size;
  unsigned bits = 0;
  const float energy = tree_of(count, [&](int i) { return __fmul_rn(x[i], x[i]); }, lane);
  const float d = stored(__fsqrt_rn(__fdiv_rn(energy, static_cast<float>(count))), side, bfloat, bits);
  if (d == 0.0f) {
    for (int c = lane; c < count; c += 32) codes[c] = static_cast<std::uint8_t>(1 << (segment.place.bits - 1));
    __syncwarp();
    return 0;
  }
  for (int c = lane; c < count; c += 32) row.y[c] = __fdiv_rn(x[c], d);
  __syncwarp();
  search_codes(segment, tables, row, count, codes, lane);
  take_unit_values(segment, tables, row, count, codes, lane);
  const float n = tree_of(count, [&](int i) { return __fmul_rn(row.y[i], row.y[i]); }, lane);
  if (rule == ScaleRule::rms || n == 0.0f) return bits;
  if (rule == ScaleRule::norm) {
    stored(__fsqrt_rn(__fdiv_rn(energy, n)), side, bfloat, bits);
    return bits;
  }
  const float refit = __fdiv_rn(tree_of(count, [&](int i) { return __fmul_rn(x[i], row.y[i]); }, lane), n);
  if (refit == refit) stored(refit, side, bfloat, bits);  // else sums that overflow both ways
  return bits;
}

/// A sum from the first term on.
struct SumOfSegments {
  float value = 0.0f;
  bool any = false;
  __device__ __forceinline__ void add(float x) { value = any ? __fadd_rn(value, x) : x, any = true; }
};

/// Quantizes a row with one scale (packing.md, "One scale a row"). @return  the scale's bits
__device__ __forceinline__ unsigned encode_with_row_scale(const float* x, const HeadRows& head, const float* tables,
                                                          ScaleRule rule, const TileSide& side, bool bfloat,
                                                          const BitRow& row, int lane) {
  SumOfSegments length, normalized;
  int channels = 0;
  for (int s = 0; s < head.num_segments; ++s) {
    const RowSegment& segment = head.segments[s];
    const float* of = x + segment.place.first_channel;
    const float energy = tree_of(segment.place.channels, [&](int i) { return __fmul_rn(of[i], of[i]); }, lane);
    length.add(energy), normalized.add(__fdiv_rn(energy, __fmul_rn(segment.gain, segment.gain)));
    channels += segment.place.channels;
  }
  unsigned bits = 0;
  const float d = stored(__fsqrt_rn(__fdiv_rn(normalized.value, static_cast<float>(channels))), side, bfloat, bits);
  SumOfSegments n, p;
  for (int s = 0; s < head.num_segments; ++s) {
    const RowSegment& segment = head.segments[s];
    const int count = segment.place.channels, first = segment.place.first_channel;
    const float* of = x + first;
    const float t = __fmul_rn(segment.gain, d);
    if (t == 0.0f) {
      for (int c = lane; c < count; c += 32)
        row.codes[first + c] = static_cast<std::uint8_t>(1 << (segment.place.bits - 1));
      __syncwarp();
    } else {
      for (int c = lane; c < count; c += 32) row.y[c] = __fdiv_rn(of[c], t);
      __syncwarp();
      search_codes(segment, tables, row, count, row.codes + first, lane);
    }
    take_unit_values(segment, tables, row, count, row.codes + first, lane);
    n.add(__fmul_rn(__fmul_rn(segment.gain, segment.gain),
                    tree_of(count, [&](int i) { return __fmul_rn(row.y[i], row.y[i]); }, lane)));
    p.add(tree_of(count, [&](int i) { return __fmul_rn(of[i], __fmul_rn(segment.gain, row.y[i])); }, lane));
    __syncwarp();  // before y is overwritten
  }
  if (d == 0.0f) return 0;
  if (rule == ScaleRule::rms || n.value == 0.0f) return bits;
  const float s = rule == ScaleRule::norm ? __fsqrt_rn(__fdiv_rn(length.value, n.value)) : __fdiv_rn(p.value, n.value);
  if (s == s) stored(s, side, bfloat, bits);
  return bits;
}

/// Stores codes as a token's row of bits. All lanes of a warp call it.
__device__ __forceinline__ void store_bits(const HeadRows& head, const TileSide& side, bool value, const BitRow& row,
                                           std::byte* tile, int token, int lane) {
  for (int w = lane; w < side.row_words; w += 32) row.words[w] = 0;
  __syncwarp();
  for (int s = 0; s < head.num_segments; ++s) {
    const BitSegment& place = head.segments[s].place;
    for (int c = lane; c < place.channels; c += 32)
      for (int i = 0; i < place.bits; ++i) {
        const int at = value ? value_bit(place, c, i) : key_bit(place, c, i);
        const unsigned bit = row.codes[place.first_channel + c] >> i & 1u;
        if (bit) atomicAdd(row.words + at / 32, 1u << at % 32);  // each bit is set once
      }
  }
  __syncwarp();
  if (value) {
    for (int y = lane; y < 4 * side.row_words; y += 32)
      tile[value_byte_offset(side, token, y)] = static_cast<std::byte>(row.words[y / 4] >> y % 4 * 8 & 0xFFu);
  } else {
    for (int w = lane; w < side.row_words; w += 32)
      *reinterpret_cast<unsigned*>(tile + key_word_offset(side, token, w)) = row.words[w];
  }
}

/// Quantizes a row of bit tiles and stores it. All lanes of a warp call it. @param x  [D] rotated; a clip changes it
/// @return  the row is finite
__device__ __forceinline__ bool code_bit_row(float* x, const HeadRows& head, const RowCode& code, const TileSide& side,
                                             bool bfloat, bool value, ScaleRule rule, int clip_rank, const BitRow& row,
                                             std::byte* tile, int token, int lane) {
  const auto put = [&](int number, unsigned bits) {
    if (lane == 0) store_number(tile + number_offset(side, token, 0, number), side, bits);
  };
  const bool finite = is_finite_row(x, side.head_dim, lane);
  const bool affine = head.num_segments > 0 && head.segments[0].kind == CodeKind::affine;
  const int numbers = code.one_scale ? min(1, head.num_segments) : affine ? 2 * head.groups : head.groups;
  if (!finite) {
    for (int c = lane; c < side.head_dim; c += 32) row.codes[c] = 0;
    for (int i = 0; i < numbers; ++i) put(i, quiet_nan(side, bfloat));
  } else if (code.one_scale) {
    if (head.num_segments > 0) put(0, encode_with_row_scale(x, head, code.tables, rule, side, bfloat, row, lane));
  } else {
    if (clip_rank > 0) clip_row(x, side.head_dim, clip_rank, lane);
    // Symmetric codes of a trellis coder take its rule if they have it.
    const ScaleRule uniform_rule = rule == ScaleRule::rms ? ScaleRule::norm : rule;
    for (int s = 0; s < head.num_segments; ++s) {
      const RowSegment& segment = head.segments[s];
      const int count = segment.group_size;
      for (int g = 0; g < segment.place.channels / count; ++g) {
        const int first = segment.place.first_channel + g * count, number = segment.first_number + g;
        if (segment.kind == CodeKind::codebook || segment.kind == CodeKind::trellis) {
          put(number,
              encode_searched(x + first, segment, code.tables, rule, side, bfloat, row, row.codes + first, lane));
          continue;
        }
        const GroupNumbers found =
            encode_uniform(x + first, {segment.place.bits, count, affine, side.integer_zero, uniform_rule}, side,
                           bfloat, row.codes + first, lane);
        put(number, found.scale);
        if (affine) put(head.groups + number, found.second);
      }
    }
  }
  for (int i = numbers; i < side.numbers; ++i) put(i, 0);  // other heads have more
  __syncwarp();
  store_bits(head, side, value, row, tile, token, lane);
  return finite;
}

/// A channel of a head's unrotated centroid.
__device__ __forceinline__ const float* centroid_channel(const RowCode& code, int head, int centroid, int dim,
                                                         int channel) {
  return code.centroids + (static_cast<std::int64_t>(code.per_head ? head : 0) * code.num_centroids + centroid) * dim +
         channel;
}

/// Squared distance of an unrotated row from a centroid of its head, in the order of packing.md. All lanes of a warp
/// call it and get the sum. @param x  channel -> float
template <typename X>
__device__ __forceinline__ float centroid_distance(const RowCode& code, int head, int centroid, int dim, X x,
                                                   int lane) {
  const float* from = centroid_channel(code, head, centroid, dim, 0);
  return tree_of(
      dim,
      [&](int i) {
        const float difference = __fsub_rn(x(i), __ldg(from + i));
        return __fmul_rn(difference, difference);
      },
      lane);
}

/// Stores the index of a token's centroid. One lane calls it.
__device__ __forceinline__ void store_index(const TileSide& side, std::byte* tile, int token, int index) {
  std::byte* at = tile + index_offset(side, token);
  if (side.index_bytes == 2)
    *reinterpret_cast<unsigned short*>(at) = static_cast<unsigned short>(index);
  else
    *at = static_cast<std::byte>(index);
}

}  // namespace kvq::generic
