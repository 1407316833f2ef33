#pragma once

#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/runtime/kernels/common/centroids.cuh>
#include <kvq/runtime/kernels/common/generic_rows.cuh>
#include <kvq/runtime/kernels/common/generic_trellis.cuh>
#include <kvq/runtime/kernels/common/row_teams.cuh>
#include <kvq/runtime/kernels/common/trellis_search.cuh>
#include <kvq/runtime/kernels/common/unit_values.cuh>

/// From rotated rows in shared memory to rows in bit tiles, as packing.md says. A warp takes up to kMostSearched rows
/// at a time, one a team. Teams without a row do what the others do, for nothing.
namespace kvq::generic {

/// Floats from row to row of BitRows::y_of(): rows are aligned to 16 bytes.
KVQ_HD constexpr int y_stride(int dim) { return (dim + 3) / 4 * 4; }

/// Bytes from row to row of BitRows::codes_of(): whole words, because codes are packed by words.
KVQ_HD constexpr int code_stride(int dim) { return (dim + 3) / 4 * 4; }

/// The rows that a warp quantizes, how, and its dynamic shared memory. It is in shared memory itself: in registers it
/// would be spilled, and local memory of all lanes does not fit the cache. @tparam kMostDim  largest head_dim
template <int kMostDim>
struct BitRows {
  int count = 0;         ///< of rows, at most kMostSearched
  unsigned numbers = 0;  ///< the rows' numbers in the block, four bits each
  float* x = nullptr;    ///< [16, kMostDim] the block's rotated rows; a clip changes them
  int dim = 0;
  TileSide side = {};
  ScaleRule rule = {};
  NumberType type = {};
  const float* tables = nullptr;  ///< RowCode::tables
  // Offsets in dynamic shared memory.
  int y_at = 0;      ///< [kMostSearched, y_stride] floats: channels with the scale left out, then unit values
  int codes_at = 0;  ///< [kMostSearched, code_stride]
  int words_at = 0;  ///< [kMostSearched, word_stride]
  int word_stride = 0;
  int search_at = 0;  ///< RowCode::search_bytes

  __device__ __forceinline__ int number(int row) const { return static_cast<int>(numbers >> (4 * row) & 15u); }
  __device__ __forceinline__ float* x_of(int row) const { return x + number(row) * kMostDim; }
  /// Of a team; of one without a row, the first row.
  template <typename Team>
  __device__ __forceinline__ const float* row_of(Team team) const {
    return x_of(team.row < count ? team.row : 0);
  }
  __device__ __forceinline__ float* y_of(int row) const {
    return reinterpret_cast<float*>(dynamic_shared(y_at)) + row * y_stride(dim);
  }
  __device__ __forceinline__ std::uint8_t* codes_of(int row) const {
    return reinterpret_cast<std::uint8_t*>(dynamic_shared(codes_at)) + row * code_stride(dim);
  }
  __device__ __forceinline__ unsigned* words_of(int row) const {
    return reinterpret_cast<unsigned*>(dynamic_shared(words_at)) + row * word_stride;
  }
};

/// Dynamic shared memory of a warp that quantizes rows of bits.
struct BitRowMemory {
  int dim = 0;           ///< the larger one of both sides
  int row_words = 0;     ///< likewise
  int search_bytes = 0;  ///< likewise, RowCode::search_bytes
  KVQ_HD constexpr int y() const { return 4 * kMostSearched * y_stride(dim); }
  KVQ_HD constexpr int codes() const { return kMostSearched * code_stride(dim); }
  KVQ_HD constexpr int words() const { return kMostSearched * ((4 * row_words + 15) / 16 * 16); }
  KVQ_HD constexpr int bytes() const { return y() + codes() + words() + (search_bytes + 15) / 16 * 16; }
  /// @param first  offset of the warp's bytes()
  /// @param x      the block's rotated rows
  template <int kMostDim>
  __device__ __forceinline__ BitRows<kMostDim> at(int first, float* x, const TileSide& side, ScaleRule rule,
                                                  NumberType type, const float* tables) const {
    const int codes_at = first + y(), words_at = codes_at + codes();
    return {
        .count = 0,
        .numbers = 0,
        .x = x,
        .dim = side.head_dim,
        .side = side,
        .rule = rule,
        .type = type,
        .tables = tables,
        .y_at = first,
        .codes_at = codes_at,
        .words_at = words_at,
        .word_stride = words() / (4 * kMostSearched),
        .search_at = words_at + words(),
    };
  }
};

/// Codes of the rows' y, with the scale left out. All lanes of a warp call it, behind a barrier.
/// @param first  of `count` channels: where their codes go
/// @return       y has the codes' unit values now
template <typename Team, int kMostDim>
__device__ __forceinline__ bool search_codes(Team team, const RowSegment& segment, const BitRows<kMostDim>& rows,
                                             int count, int first, int lane) {
  const int bits = segment.place.bits;
  const float* table = rows.tables + segment.table;
  if (segment.kind == CodeKind::trellis) {
    const SearchedRows searched{
        .count = rows.count,
        .y = rows.y_at,
        .codes = rows.codes_at + first,
        .stride = y_stride(rows.dim),
        .code_stride = code_stride(rows.dim),
        .channels = count,
        .memory = rows.search_at,
    };
    if (search_if_known(team, segment, table, searched, lane)) return true;
    for (int r = 0; r < rows.count; ++r) {
      std::byte* memory = dynamic_shared(rows.search_at);
      std::uint8_t* codes = rows.codes_of(r) + first;
      if (segment.integers)
        search_integers({table, bits, segment.memory, memory}, rows.y_of(r), count, codes, lane);
      else
        search_trellis({table, bits, segment.memory, memory}, rows.y_of(r), count, codes, lane);
    }
    return false;
  }
  const float* y = rows.y_of(team.row);
  std::uint8_t* codes = rows.codes_of(team.row) + first;
  team.for_each(count, [&](int c) {
    int code = 0;
    if (segment.kind == CodeKind::codebook) {
      const float* thresholds = table + (1 << bits);
      for (int i = 0; i < (1 << bits) - 1; ++i) code += thresholds[i] <= y[c];
    } else {
      const float edge = static_cast<float>(1 << (bits - 1)), quotient = floorf(__fdiv_rn(y[c], gaussian_step(bits)));
      code = static_cast<int>(fminf(fmaxf(quotient, -edge), edge - 1.0f)) + (1 << (bits - 1));
    }
    codes[c] = static_cast<std::uint8_t>(code);
  });
  __syncwarp();
  return false;
}

/// y = x / scale, or 0 if the scale is 0: then the codes are 2^(b-1), whatever y is. Not inlined, because the functions
/// around it call others, so what a loop in them needs would be in local memory.
template <typename Team>
__device__ __noinline__ void leave_scale_out(Team team, float* y, const float* x, int count, float scale) {
  team.template for_each<4>(count, [&](int c) { y[c] = scale == 0.0f ? 0.0f : __fdiv_rn(x[c], scale); });
}

/// y = the unit values of a row's codes, unless y has them: search_codes(). A row without scale gets its codes, and any
/// values. All lanes of a warp call it.
template <typename Team>
__device__ __forceinline__ void take_unit_values(Team team, const RowSegment& segment, const float* tables, float* y,
                                                 int count, std::uint8_t* codes, bool no_scale, bool has_values) {
  if (no_scale)
    team.for_each(count, [&](int c) { codes[c] = static_cast<std::uint8_t>(1 << (segment.place.bits - 1)); });
  __syncwarp();
  if (has_values) return;
  team.for_each(count, [&](int c) { y[c] = unit_value(segment, tables, codes, count, c); });
  __syncwarp();
}

/// Quantizes one group of each row with a codebook or trellis that has a scale of its own.
/// @param first  channel of the group
/// @return       the bits of the scale of the team's row
template <typename Team, int kMostDim>
__device__ __noinline__ unsigned encode_searched(const BitRows<kMostDim>& rows, const RowSegment& segment, int first,
                                                 int lane) {
  const int count = segment.group_size;
  const Team team(lane);
  const float* x = rows.row_of(team) + first;
  float* y = rows.y_of(team.row);
  unsigned result = 0;
  const float energy = tree_of_products<Team, kMostDim>(team, count, x, x, 1.0f);
  float d = stored(__fsqrt_rn(__fdiv_rn(energy, static_cast<float>(count))), rows.type, result);
  if (team.row >= rows.count) d = 0.0f;
  leave_scale_out(team, y, x, count, d);
  __syncwarp();
  const bool has_values = search_codes(team, segment, rows, count, first, lane);
  take_unit_values(team, segment, rows.tables, y, count, rows.codes_of(team.row) + first, d == 0.0f, has_values);
  const float n = tree_of_products<Team, kMostDim>(team, count, y, y, 1.0f);
  float s = __fsqrt_rn(__fdiv_rn(energy, n));
  if (rows.rule == ScaleRule::least_squares)
    s = __fdiv_rn(tree_of_products<Team, kMostDim>(team, count, x, y, 1.0f), n);
  if (d == 0.0f)
    result = 0;
  else if (rows.rule != ScaleRule::rms && n != 0.0f && s == s)  // NaN: products that overflow both ways
    stored(s, rows.type, result);
  __syncwarp();  // before y is overwritten
  return result;
}

/// Quantizes rows with one scale (packing.md, "One scale a row"). @return  as encode_searched()
template <typename Team, int kMostDim>
__device__ __noinline__ unsigned encode_with_row_scale(const BitRows<kMostDim>& rows, const HeadRows& head, int lane) {
  const Team team(lane);
  const float* row = rows.row_of(team);
  float* y = rows.y_of(team.row);
  unsigned result = 0;
  SumOfSegments length, normalized, squares, products;
  int channels = 0;
  for (int s = 0; s < head.num_segments; ++s) {
    const RowSegment& segment = head.segments[s];
    const float* x = row + segment.place.first_channel;
    const float energy = tree_of_products<Team, kMostDim>(team, segment.place.channels, x, x, 1.0f);
    length.add(energy), normalized.add(__fdiv_rn(energy, __fmul_rn(segment.gain, segment.gain)));
    channels += segment.place.channels;
  }
  float d = stored(__fsqrt_rn(__fdiv_rn(normalized.value, static_cast<float>(channels))), rows.type, result);
  if (team.row >= rows.count) d = 0.0f;
  for (int s = 0; s < head.num_segments; ++s) {
    const RowSegment& segment = head.segments[s];
    const int count = segment.place.channels, first = segment.place.first_channel;
    const float gain = segment.gain, t = __fmul_rn(gain, d);
    const float* x = row + first;
    leave_scale_out(team, y, x, count, t);
    __syncwarp();
    const bool has_values = search_codes(team, segment, rows, count, first, lane);
    take_unit_values(team, segment, rows.tables, y, count, rows.codes_of(team.row) + first, t == 0.0f, has_values);
    if (rows.rule == ScaleRule::rms) continue;
    squares.add(__fmul_rn(__fmul_rn(gain, gain), tree_of_products<Team, kMostDim>(team, count, y, y, 1.0f)));
    if (rows.rule != ScaleRule::norm) products.add(tree_of_products<Team, kMostDim>(team, count, x, y, gain));
    __syncwarp();  // before y is overwritten
  }
  if (d == 0.0f) return 0;
  if (rows.rule == ScaleRule::rms || squares.value == 0.0f) return result;
  const float s = rows.rule == ScaleRule::norm ? __fsqrt_rn(__fdiv_rn(length.value, squares.value))
                                               : __fdiv_rn(products.value, squares.value);
  if (s == s) stored(s, rows.type, result);
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

/// Stores the codes of each team's row as a token's row of bits. All lanes of a warp call it. Not inlined, like
/// leave_scale_out().
/// @param tile   of the team's row; null: it is not stored
template <typename Team, int kMostDim>
__device__ __noinline__ void store_bits(Team team, const BitRows<kMostDim>& rows, const HeadRows& head, bool value,
                                        std::byte* tile, int token) {
  const TileSide& side = rows.side;
  unsigned* words = rows.words_of(team.row);
#pragma unroll 1
  for (int w = team.lane; w < side.row_words; w += Team::kWidth) words[w] = 0;
  __syncwarp();
#pragma unroll 1
  for (int word = team.lane;; word += Team::kWidth) {
    const auto own = PackedCodes::of(head, value, word);
    if (own.count < 0) break;
    if (own.count == 0) continue;
    const unsigned packed = own.pack(rows.codes_of(team.row)), beyond = __funnelshift_l(packed, 0, own.at % 32);
    atomicAdd(&words[own.at / 32], packed << own.at % 32);
    if (beyond) atomicAdd(&words[own.at / 32 + 1], beyond);
  }
  __syncwarp();
  if (tile == nullptr) return;
  if (value) {
#pragma unroll 1
    for (int y = team.lane; y < 4 * side.row_words; y += Team::kWidth)
      tile[value_byte_offset(side, token, y)] = static_cast<std::byte>(words[y / 4] >> y % 4 * 8 & 0xFFu);
  } else {
#pragma unroll 1
    for (int w = team.lane; w < side.row_words; w += Team::kWidth)
      *reinterpret_cast<unsigned*>(tile + key_word_offset(side, token, w)) = words[w];
  }
}

/// Quantizes rows of bit tiles and stores them. All lanes of a warp call it; it ends with a barrier.
/// @param tile   of the team's row; null: it is not stored
/// @param token  of the team's row in the tile
/// @return       bit r: row r is finite
template <typename Team, int kMostDim>
__device__ __forceinline__ unsigned code_bit_rows(Team team, const BitRows<kMostDim>& rows, const HeadRows& head,
                                                  const RowCode& code, bool value, int clip_rank, std::byte* tile,
                                                  int token, int lane) {
  const TileSide& side = rows.side;
  const auto put = [&](int number, unsigned bits) {
    store_number(tile + number_offset(side, token, 0, number), side, bits);
  };
  const bool affine = head.num_segments > 0 && head.segments[0].kind == CodeKind::affine;
  const int used = code.one_scale ? min(1, head.num_segments) : affine ? 2 * head.groups : head.groups;
  bool own_finite = true;
  const float* x = rows.row_of(team);
  team.template for_each<4>(side.head_dim, [&](int c) { own_finite = own_finite && is_finite(x[c]); });
  const unsigned finite = Team::all_of_each(own_finite);
  const bool is_finite_team = finite >> team.row & 1u;
  const auto put_of_team = [&](int number, unsigned bits) {
    if (tile != nullptr && is_finite_team && team.lane == 0) put(number, bits);
  };
  // Rows that are not finite are searched with the others, for nothing.
  if (code.one_scale) {
    if (head.num_segments > 0) put_of_team(0, encode_with_row_scale<Team>(rows, head, lane));
  } else {
    for (int r = 0; clip_rank > 0 && r < rows.count; ++r)
      if (finite >> r & 1u) clip_row<kMostDim>(rows.x_of(r), side.head_dim, clip_rank, lane);
    // Symmetric codes of a trellis coder take its rule if they have it.
    const ScaleRule uniform_rule = rows.rule == ScaleRule::rms ? ScaleRule::norm : rows.rule;
    for (int s = 0; s < head.num_segments; ++s) {
      const RowSegment& segment = head.segments[s];
      const int count = segment.group_size;
      for (int g = 0; g < segment.place.channels / count; ++g) {
        const int first = segment.place.first_channel + g * count, number = segment.first_number + g;
        if (segment.kind == CodeKind::codebook || segment.kind == CodeKind::trellis) {
          put_of_team(number, encode_searched<Team>(rows, segment, first, lane));
          continue;
        }
        for (int r = 0; r < rows.count; ++r) {
          if (!(finite >> r & 1u)) continue;
          const GroupNumbers found = encode_uniform<kMostDim>(
              rows.x_of(r) + first, {segment.place.bits, count, affine, side.integer_zero, uniform_rule}, rows.type,
              rows.codes_of(r) + first, lane);
          if (lane != r * Team::kWidth) continue;
          put(number, found.scale);
          if (affine) put(head.groups + number, found.second);
        }
      }
    }
  }
  __syncwarp();
  if (!is_finite_team) team.for_each(side.head_dim, [&](int c) { rows.codes_of(team.row)[c] = 0; });
  if (tile != nullptr)
    for (int i = is_finite_team ? used + team.lane : team.lane; i < side.numbers; i += Team::kWidth)
      put(i, i < used ? quiet_nan(rows.type) : 0);
  store_bits(team, rows, head, value, tile, token);
  __syncwarp();
  return finite;
}

}  // namespace kvq::generic
