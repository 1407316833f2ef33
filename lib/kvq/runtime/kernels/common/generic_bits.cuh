#pragma once

#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/runtime/kernels/common/centroids.cuh>
#include <kvq/runtime/kernels/common/generic_rows.cuh>
#include <kvq/runtime/kernels/common/generic_trellis.cuh>
#include <kvq/runtime/kernels/common/trellis_search.cuh>
#include <kvq/runtime/kernels/common/unit_values.cuh>

/// From rotated rows in shared memory to rows in bit tiles, as packing.md says. A warp takes up to
/// kMostSearched rows at a time.
namespace kvq::generic {

/// Floats from row to row of BitRows::y_of().
KVQ_HD constexpr int y_stride(int dim) { return dim + kSeamLength; }

/// The rows that a warp quantizes, and its dynamic shared memory. @tparam kMostDim  largest head_dim
template <int kMostDim>
struct BitRows {
  int count;         ///< of rows, at most kMostSearched
  unsigned numbers;  ///< the rows' numbers in the block, four bits each
  float* x;          ///< [16, kMostDim] the block's rotated rows; a clip changes them
  int dim;
  // Offsets in dynamic shared memory.
  int y_at;  ///< [count, y_stride] floats: channels with the scale left out, then unit values; kSeamLength floats lie
             ///< before each row
  int codes_at;   ///< [count, D]
  int words_at;   ///< a row
  int search_at;  ///< RowCode::search_bytes

  __device__ __forceinline__ int number(int row) const { return static_cast<int>(numbers >> (4 * row) & 15u); }
  __device__ __forceinline__ float* x_of(int row) const { return x + number(row) * kMostDim; }
  __device__ __forceinline__ float* y_of(int row) const {
    return reinterpret_cast<float*>(dynamic_shared(y_at)) + row * y_stride(dim);
  }
  __device__ __forceinline__ std::uint8_t* codes_of(int row) const {
    return reinterpret_cast<std::uint8_t*>(dynamic_shared(codes_at)) + row * dim;
  }
  __device__ __forceinline__ unsigned* words() const { return reinterpret_cast<unsigned*>(dynamic_shared(words_at)); }
};

/// Dynamic shared memory of a warp that quantizes rows of bits.
struct BitRowMemory {
  int dim = 0;           ///< the larger one of both sides
  int row_words = 0;     ///< likewise
  int search_bytes = 0;  ///< likewise, RowCode::search_bytes
  KVQ_HD constexpr int y() const { return 4 * kMostSearched * y_stride(dim); }
  KVQ_HD constexpr int codes() const { return (kMostSearched * dim + 15) / 16 * 16; }
  KVQ_HD constexpr int words() const { return (4 * row_words + 15) / 16 * 16; }
  KVQ_HD constexpr int bytes() const { return y() + codes() + words() + (search_bytes + 15) / 16 * 16; }
  /// @param first  offset of the warp's bytes()
  template <int kMostDim>
  __device__ __forceinline__ BitRows<kMostDim> at(int first, float (&x)[kTileTokens][kMostDim], int side_dim) const {
    const int codes_at = first + y(), words_at = codes_at + codes();
    return {0, 0, x[0], side_dim, first + 4 * kSeamLength, codes_at, words_at, words_at + words()};
  }
};

/// A number of each row of a warp; lane r has that of row r.
struct PerRow {
  float own = 0.0f;
  int lane;
  __device__ __forceinline__ explicit PerRow(int lane) : lane(lane) {}
  __device__ __forceinline__ float operator[](int row) const { return __shfl_sync(kAll, own, row); }
  __device__ __forceinline__ void set(int row, float x) {
    if (lane == row) own = x;
  }
};

/// Codes of the rows' y, with the scale left out. All lanes of a warp call it, behind a barrier.
/// @param first  of `count` channels: where their codes go
/// @return       y has the codes' unit values now
template <int kMostDim>
__device__ __forceinline__ bool search_codes(const RowSegment& segment, const float* tables,
                                             const BitRows<kMostDim>& rows, int count, int first, int lane) {
  const int bits = segment.place.bits;
  const float* table = tables + segment.table;
  if (segment.kind == CodeKind::trellis) {
    const SearchedRows searched{
        .count = rows.count,
        .y = rows.y_at,
        .codes = rows.codes_at + first,
        .stride = y_stride(rows.dim),
        .code_stride = rows.dim,
        .channels = count,
        .memory = rows.search_at,
    };
    if (search_if_known(bits, segment.memory, table, searched, lane)) return true;
    for (int r = 0; r < rows.count; ++r)
      search_trellis({table, bits, segment.memory, dynamic_shared(rows.search_at)}, rows.y_of(r), count,
                     rows.codes_of(r) + first, lane);
    return false;
  }
  for (int r = 0; r < rows.count; ++r) {
    const float* y = rows.y_of(r);
    for (int c = lane; c < count; c += 32) {
      int code = 0;
      if (segment.kind == CodeKind::codebook) {
        const float* thresholds = table + (1 << bits);
        for (int i = 0; i < (1 << bits) - 1; ++i) code += thresholds[i] <= y[c];
      } else {
        const float edge = static_cast<float>(1 << (bits - 1)), quotient = floorf(__fdiv_rn(y[c], gaussian_step(bits)));
        code = static_cast<int>(fminf(fmaxf(quotient, -edge), edge - 1.0f)) + (1 << (bits - 1));
      }
      rows.codes_of(r)[first + c] = static_cast<std::uint8_t>(code);
    }
  }
  __syncwarp();
  return false;
}

/// y = x / scale, or 0 if the scale is 0: then the codes are 2^(b-1), whatever y is. All lanes of a warp call it.
__device__ __forceinline__ void leave_scale_out(float* y, const float* x, int count, float scale, int lane) {
  for (int c = lane; c < count; c += 32) y[c] = scale == 0.0f ? 0.0f : __fdiv_rn(x[c], scale);
}

/// y = the unit values of a row's codes, unless y has them: search_codes(). A row without scale gets its codes, and any
/// values. All lanes of a warp call it.
__device__ __forceinline__ void take_unit_values(const RowSegment& segment, const float* tables, float* y, int count,
                                                 std::uint8_t* codes, bool no_scale, bool has_values, int lane) {
  if (no_scale) {
    for (int c = lane; c < count; c += 32) codes[c] = static_cast<std::uint8_t>(1 << (segment.place.bits - 1));
    __syncwarp();
  }
  if (has_values) return;
  for (int c = lane; c < count; c += 32) y[c] = unit_value(segment, tables, codes, count, c);
  __syncwarp();
}

/// What packing.md says of a side's numbers.
struct NumberRule {
  ScaleRule rule;
  const TileSide& side;
  bool bfloat;
};

/// Quantizes one group of each row with a codebook or trellis that has a scale of its own.
/// @param first  channel of the group
/// @return       the scales' bits; lane r has those of row r
template <int kMostDim>
__device__ __noinline__ unsigned encode_searched(const BitRows<kMostDim> rows, const RowSegment& segment,
                                                 const float* tables, const NumberRule& numbers, int first, int lane) {
  const int count = segment.group_size;
  const auto& [rule, side, bfloat] = numbers;
  PerRow energies(lane), scales(lane);
  unsigned result = 0;
  const auto store = [&](int r, float x) {
    unsigned bits = 0;
    const float y = stored(x, side, bfloat, bits);
    if (lane == r) result = bits;
    return y;
  };
  for (int r = 0; r < rows.count; ++r) {
    const float* x = rows.x_of(r) + first;
    const float energy = tree_of<kMostDim>(
                    count, [&](int i) { return __fmul_rn(x[i], x[i]); }, lane),
                d = store(r, __fsqrt_rn(__fdiv_rn(energy, static_cast<float>(count))));
    energies.set(r, energy), scales.set(r, d);
    leave_scale_out(rows.y_of(r), x, count, d, lane);
  }
  __syncwarp();
  const bool has_values = search_codes(segment, tables, rows, count, first, lane);
  for (int r = 0; r < rows.count; ++r) {
    const float *x = rows.x_of(r) + first, d = scales[r], energy = energies[r];
    float* y = rows.y_of(r);
    take_unit_values(segment, tables, y, count, rows.codes_of(r) + first, d == 0.0f, has_values, lane);
    if (d == 0.0f) {
      if (lane == r) result = 0;
      continue;
    }
    const float n = tree_of<kMostDim>(count, [&](int i) { return __fmul_rn(y[i], y[i]); }, lane);
    if (rule == ScaleRule::rms || n == 0.0f) continue;
    if (rule == ScaleRule::norm) {
      store(r, __fsqrt_rn(__fdiv_rn(energy, n)));
      continue;
    }
    const float refit = __fdiv_rn(tree_of<kMostDim>(count, [&](int i) { return __fmul_rn(x[i], y[i]); }, lane), n);
    if (refit == refit) store(r, refit);  // else sums that overflow both ways
  }
  __syncwarp();  // before y is overwritten
  return result;
}

/// Quantizes rows with one scale (packing.md, "One scale a row"). @return  as encode_searched()
template <int kMostDim>
__device__ __noinline__ unsigned encode_with_row_scale(const BitRows<kMostDim> rows, const HeadRows& head,
                                                       const float* tables, const NumberRule& numbers, int lane) {
  const auto& [rule, side, bfloat] = numbers;
  PerRow lengths(lane), scales(lane), values(lane), products(lane);
  unsigned result = 0;
  for (int r = 0; r < rows.count; ++r) {
    const float* x = rows.x_of(r);
    SumOfSegments length, normalized;
    int channels = 0;
    for (int s = 0; s < head.num_segments; ++s) {
      const RowSegment& segment = head.segments[s];
      const float* of = x + segment.place.first_channel;
      const float energy =
          tree_of<kMostDim>(segment.place.channels, [&](int i) { return __fmul_rn(of[i], of[i]); }, lane);
      length.add(energy), normalized.add(__fdiv_rn(energy, __fmul_rn(segment.gain, segment.gain)));
      channels += segment.place.channels;
    }
    unsigned bits = 0;
    lengths.set(r, length.value);
    scales.set(r, stored(__fsqrt_rn(__fdiv_rn(normalized.value, static_cast<float>(channels))), side, bfloat, bits));
    if (lane == r) result = bits;
  }
  for (int s = 0; s < head.num_segments; ++s) {
    const RowSegment& segment = head.segments[s];
    const int count = segment.place.channels, first = segment.place.first_channel;
    const float gain = segment.gain;
    for (int r = 0; r < rows.count; ++r)
      leave_scale_out(rows.y_of(r), rows.x_of(r) + first, count, __fmul_rn(gain, scales[r]), lane);
    __syncwarp();
    const bool has_values = search_codes(segment, tables, rows, count, first, lane);
    for (int r = 0; r < rows.count; ++r) {
      const float* x = rows.x_of(r) + first;
      float* y = rows.y_of(r);
      take_unit_values(segment, tables, y, count, rows.codes_of(r) + first, __fmul_rn(gain, scales[r]) == 0.0f,
                       has_values, lane);
      const auto add = [&](PerRow& sums, float x) { sums.set(r, s == 0 ? x : __fadd_rn(sums[r], x)); };
      if (rule == ScaleRule::rms) continue;
      add(values, __fmul_rn(__fmul_rn(gain, gain),
                            tree_of<kMostDim>(count, [&](int i) { return __fmul_rn(y[i], y[i]); }, lane)));
      if (rule != ScaleRule::norm)
        add(products, tree_of<kMostDim>(count, [&](int i) { return __fmul_rn(x[i], __fmul_rn(gain, y[i])); }, lane));
    }
    __syncwarp();  // before y is overwritten
  }
  // Lane r ends row r.
  if (scales.own == 0.0f) return 0;
  if (rule == ScaleRule::rms || values.own == 0.0f) return result;
  const float s =
      rule == ScaleRule::norm ? __fsqrt_rn(__fdiv_rn(lengths.own, values.own)) : __fdiv_rn(products.own, values.own);
  if (s == s) stored(s, side, bfloat, result);
  return result;
}

/// Neighboring codes of a unit and those of their bits that lie together: at most a word, which one lane packs.
struct PackedCodes {
  int first = 0;   ///< channel of the row
  int count = -1;  ///< codes; negative: the row has no such word
  int bit = 0;     ///< the lowest one that is packed
  int width = 1;   ///< bits of a code: 1, 2, 4 or 8
  int at = 0;      ///< where they go: bit of the row

  /// The word-th of a row. A unit has as many as a code has bits; in a short unit some have no codes.
  static __device__ __forceinline__ PackedCodes of(const HeadRows& head, bool value, int word) {
#pragma unroll 1
    for (int s = 0; s < head.num_segments; ++s) {
      const BitSegment& place = head.segments[s].place;
      const int bits = place.bits, words = (place.channels + kUnitChannels - 1) / kUnitChannels * bits;
      if (word >= words) {
        word -= words;
        continue;
      }
      const int unit = word / bits * kUnitChannels, bit = word % bits;
      const CodeField field = value ? code_field(bits, bit) : CodeField{bit, 1};
      const int channels = min(kUnitChannels, place.channels - unit), each = 32 / field.width;
      const int skipped = (bit - field.first) * each;  // codes in the field's words before
      return {
          .first = place.first_channel + unit + skipped,
          .count = min(each, max(0, channels - skipped)),
          .bit = field.first,
          .width = field.width,
          .at = place.first_bit + unit * bits + field.first * channels + skipped * field.width,
      };
    }
    return {};
  }

  /// @param codes  of the row, aligned to 4; four behind the last one are read, too, and not used
  __device__ __forceinline__ unsigned pack(const std::uint8_t* codes) const {
    const auto* fours = reinterpret_cast<const unsigned*>(codes) + first / 4;
    const unsigned fields = 0x01010101u * ((1u << width) - 1), pairs = 0x00010001u * ((1u << (2 * width)) - 1),
                   all = ~0u >> (32 - 4 * width);
    unsigned packed = 0, four = fours[0];
#pragma unroll 2
    for (int at_bit = 0; at_bit < 32; at_bit += 4 * width) {
      const unsigned next = *++fours;
      unsigned x = __funnelshift_r(four, next, first % 4 * 8) >> bit & fields;
      x = (x | x >> (8 - width)) & pairs;
      packed |= ((x | x >> (16 - 2 * width)) & all) << at_bit;
      four = next;
    }
    return count * width < 32 ? packed & ((1u << (count * width)) - 1) : packed;
  }
};

/// Stores codes as a token's row of bits. All lanes of a warp call it.
/// @param own    PackedCodes::of() with word = lane
/// @param words  [side.row_words] scratch
__device__ __forceinline__ void store_bits(const HeadRows& head, const TileSide& side, bool value, PackedCodes own,
                                           const std::uint8_t* codes, unsigned* words, std::byte* tile, int token,
                                           int lane) {
  for (int w = lane; w < side.row_words; w += 32) words[w] = 0;
  __syncwarp();
#pragma unroll 1
  for (int word = lane; own.count >= 0; own = PackedCodes::of(head, value, word += 32)) {
    if (own.count == 0) continue;
    const unsigned packed = own.pack(codes), beyond = __funnelshift_l(packed, 0, own.at % 32);
    atomicAdd(&words[own.at / 32], packed << own.at % 32);
    if (beyond) atomicAdd(&words[own.at / 32 + 1], beyond);
  }
  __syncwarp();
  if (value) {
    for (int y = lane; y < 4 * side.row_words; y += 32)
      tile[value_byte_offset(side, token, y)] = static_cast<std::byte>(words[y / 4] >> y % 4 * 8 & 0xFFu);
  } else {
    for (int w = lane; w < side.row_words; w += 32)
      *reinterpret_cast<unsigned*>(tile + key_word_offset(side, token, w)) = words[w];
  }
  __syncwarp();
}

/// Quantizes rows of bit tiles and stores them. All lanes of a warp call it.
/// @param tile_of   row -> its tile
/// @param token_of  row -> its token in the tile
/// @return          bit r: row r is finite
template <int kMostDim, typename TileOf, typename TokenOf>
__device__ __forceinline__ unsigned code_bit_rows(const BitRows<kMostDim>& rows, const HeadRows& head,
                                                  const RowCode& code, const NumberRule& numbers, bool value,
                                                  int clip_rank, TileOf tile_of, TokenOf token_of, int lane) {
  const TileSide& side = numbers.side;
  const auto put = [&](int row, int number, unsigned bits) {
    store_number(tile_of(row) + number_offset(side, token_of(row), 0, number), side, bits);
  };
  const bool affine = head.num_segments > 0 && head.segments[0].kind == CodeKind::affine;
  const int used = code.one_scale ? min(1, head.num_segments) : affine ? 2 * head.groups : head.groups;
  unsigned finite = 0;
  for (int r = 0; r < rows.count; ++r) finite |= is_finite_row(rows.x_of(r), side.head_dim, lane) ? 1u << r : 0u;
  const auto put_of_lane = [&](int number, unsigned bits) {  // lane r has that of row r
    if (lane < rows.count && finite >> lane & 1u) put(lane, number, bits);
  };
  // Rows that are not finite are searched with the others, for nothing.
  if (code.one_scale) {
    if (head.num_segments > 0) put_of_lane(0, encode_with_row_scale(rows, head, code.tables, numbers, lane));
  } else {
    for (int r = 0; clip_rank > 0 && r < rows.count; ++r)
      if (finite >> r & 1u) clip_row<kMostDim>(rows.x_of(r), side.head_dim, clip_rank, lane);
    // Symmetric codes of a trellis coder take its rule if they have it.
    const ScaleRule uniform_rule = numbers.rule == ScaleRule::rms ? ScaleRule::norm : numbers.rule;
    for (int s = 0; s < head.num_segments; ++s) {
      const RowSegment& segment = head.segments[s];
      const int count = segment.group_size;
      for (int g = 0; g < segment.place.channels / count; ++g) {
        const int first = segment.place.first_channel + g * count, number = segment.first_number + g;
        if (segment.kind == CodeKind::codebook || segment.kind == CodeKind::trellis) {
          put_of_lane(number, encode_searched(rows, segment, code.tables, numbers, first, lane));
          continue;
        }
        for (int r = 0; r < rows.count; ++r) {
          if (!(finite >> r & 1u)) continue;
          const GroupNumbers found = encode_uniform<kMostDim>(
              rows.x_of(r) + first, {segment.place.bits, count, affine, side.integer_zero, uniform_rule}, side,
              numbers.bfloat, rows.codes_of(r) + first, lane);
          if (lane != 0) continue;
          put(r, number, found.scale);
          if (affine) put(r, head.groups + number, found.second);
        }
      }
    }
  }
  __syncwarp();
  const PackedCodes packed_codes = PackedCodes::of(head, value, lane);
  for (int r = 0; r < rows.count; ++r) {
    const bool is_finite = finite >> r & 1u;
    for (int c = lane; !is_finite && c < side.head_dim; c += 32) rows.codes_of(r)[c] = 0;
    for (int i = is_finite ? used + lane : lane; i < side.numbers; i += 32)
      put(r, i, i < used ? quiet_nan(side, numbers.bfloat) : 0);
    __syncwarp();
    store_bits(head, side, value, packed_codes, rows.codes_of(r), rows.words(), tile_of(r), token_of(r), lane);
  }
  return finite;
}

}  // namespace kvq::generic
