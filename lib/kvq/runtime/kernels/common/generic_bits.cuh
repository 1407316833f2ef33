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

/// Sum of the squares of a segment of the team's row. All lanes of a warp call it.
template <typename Team, int kMostDim>
__device__ __forceinline__ float segment_energy(const BitRows<kMostDim>& rows, const RowSegment& segment, Team team) {
  const float* x = rows.row_of(team) + segment.place.first_channel;
  return tree_of_products<Team, kMostDim>(team, segment.place.channels, x, x, 1.0f);
}

/// The scale that a row with one scale is coded with (packing.md, "One scale a row").
struct FirstScale {
  float d;
  unsigned bits;  ///< of d
  float length;   ///< sum of squares of the row
};
/// @param energy_of  number of a segment -> segment_energy()
template <typename EnergyOf>
__device__ __forceinline__ FirstScale first_scale(const HeadRows& head, NumberType type, EnergyOf energy_of) {
  SumOfSegments length, normalized;
  int channels = 0;
  for (int s = 0; s < head.num_segments; ++s) {
    const RowSegment& segment = head.segments[s];
    const float energy = energy_of(s);
    length.add(energy), normalized.add(__fdiv_rn(energy, __fmul_rn(segment.gain, segment.gain)));
    channels += segment.place.channels;
  }
  FirstScale first = {.d = 0.0f, .bits = 0, .length = length.value};
  first.d = stored(__fsqrt_rn(__fdiv_rn(normalized.value, static_cast<float>(channels))), type, first.bits);
  return first;
}

/// Sums over a row's codes, from which last_scale() follows.
template <typename Sum>
struct ScaleSums {
  Sum squares = {};   ///< of the codes' unit values times the gain
  Sum products = {};  ///< of channels and these; only if the rule is `least_squares`
};

/// Quantizes one segment of rows with one scale. All lanes of a warp call it.
/// @param d  FirstScale::d of the team's row, 0 of a team without one
template <typename Team, int kMostDim>
__device__ __forceinline__ ScaleSums<float> encode_segment(Team team, const BitRows<kMostDim>& rows,
                                                           const RowSegment& segment, float d, int lane) {
  const int count = segment.place.channels, first = segment.place.first_channel;
  const float gain = segment.gain, t = __fmul_rn(gain, d);
  const float* x = rows.row_of(team) + first;
  float* y = rows.y_of(team.row);
  leave_scale_out(team, y, x, count, t);
  __syncwarp();
  const bool has_values = search_codes(team, segment, rows, count, first, lane);
  take_unit_values(team, segment, rows.tables, y, count, rows.codes_of(team.row) + first, t == 0.0f, has_values);
  ScaleSums<float> sums;
  if (rows.rule == ScaleRule::rms) return sums;
  sums.squares = __fmul_rn(__fmul_rn(gain, gain), tree_of_products<Team, kMostDim>(team, count, y, y, 1.0f));
  if (rows.rule != ScaleRule::norm) sums.products = tree_of_products<Team, kMostDim>(team, count, x, y, gain);
  __syncwarp();  // before y is overwritten
  return sums;
}

/// Bits of the scale that is stored with a row.
__device__ __forceinline__ unsigned last_scale(const FirstScale& first, const ScaleSums<SumOfSegments>& sums,
                                               ScaleRule rule, NumberType type) {
  unsigned bits = first.bits;
  if (first.d == 0.0f) return 0;
  if (rule == ScaleRule::rms || sums.squares.value == 0.0f) return bits;
  const float s = rule == ScaleRule::norm ? __fsqrt_rn(__fdiv_rn(first.length, sums.squares.value))
                                          : __fdiv_rn(sums.products.value, sums.squares.value);
  if (s == s) stored(s, type, bits);
  return bits;
}

/// Quantizes rows with one scale. @return  as encode_searched()
template <typename Team, int kMostDim>
__device__ __noinline__ unsigned encode_with_row_scale(const BitRows<kMostDim>& rows, const HeadRows& head, int lane) {
  const Team team(lane);
  FirstScale first = first_scale(head, rows.type, [&](int s) { return segment_energy(rows, head.segments[s], team); });
  if (team.row >= rows.count) first.d = 0.0f;
  ScaleSums<SumOfSegments> sums;
  for (int s = 0; s < head.num_segments; ++s) {
    const ScaleSums<float> own = encode_segment(team, rows, head.segments[s], first.d, lane);
    sums.squares.add(own.squares), sums.products.add(own.products);
  }
  return last_scale(first, sums, rows.rule, rows.type);
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

  /// Puts them into the words of the row, which other lanes do at the same time. @param codes  as pack()
  __device__ __forceinline__ void put(const std::uint8_t* codes, unsigned* words) const {
    if (count <= 0) return;
    const unsigned packed = pack(codes), beyond = __funnelshift_l(packed, 0, at % 32);
    atomicAdd(&words[at / 32], packed << at % 32);
    if (beyond) atomicAdd(&words[at / 32 + 1], beyond);
  }
};

/// Clears the words of each team's row. All lanes of a warp call it; a barrier has to follow.
template <typename Team, int kMostDim>
__device__ __forceinline__ void clear_words(Team team, const BitRows<kMostDim>& rows) {
#pragma unroll 1
  for (int w = team.lane; w < rows.side.row_words; w += Team::kWidth) rows.words_of(team.row)[w] = 0;
}

/// Puts the codes of each team's row into its words, from word number `first` on; a barrier has to follow.
template <typename Team, int kMostDim>
__device__ __forceinline__ void pack_words(Team team, const BitRows<kMostDim>& rows, const HeadRows& head, bool value,
                                           int first) {
#pragma unroll 1
  for (int word = first + team.lane;; word += Team::kWidth) {
    const auto own = PackedCodes::of(head, value, word);
    if (own.count < 0) break;
    own.put(rows.codes_of(team.row), rows.words_of(team.row));
  }
}

/// Stores the words of each team's row as a token's row of bits. @param tile  of the team's row
template <typename Team, int kMostDim>
__device__ __forceinline__ void store_words(Team team, const BitRows<kMostDim>& rows, bool value, std::byte* tile,
                                            int token) {
  const TileSide& side = rows.side;
  const unsigned* words = rows.words_of(team.row);
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

/// Stores the codes of each team's row as a token's row of bits. All lanes of a warp call it. Not inlined, like
/// leave_scale_out().
/// @param tile  of the team's row; null: it is not stored
template <typename Team, int kMostDim>
__device__ __noinline__ void store_bits(Team team, const BitRows<kMostDim>& rows, const HeadRows& head, bool value,
                                        std::byte* tile, int token) {
  clear_words(team, rows);
  __syncwarp();
  pack_words(team, rows, head, value, 0);
  __syncwarp();
  if (tile != nullptr) store_words(team, rows, value, tile, token);
}

/// Which of the warp's rows are finite: bit r is that of row r. All lanes of a warp call it.
template <typename Team, int kMostDim>
__device__ __forceinline__ unsigned finite_rows(Team team, const BitRows<kMostDim>& rows) {
  bool own = true;
  const float* x = rows.row_of(team);
  team.template for_each<4>(rows.dim, [&](int c) { own = own && is_finite(x[c]); });
  return Team::all_of_each(own);
}

/// Quantizes the groups of a segment, each with scales of its own. All lanes of a warp call it.
/// @param finite  finite_rows(); trellises and codebooks quantize the other rows, too, for nothing
/// @param put     (row, number, bits): stores a number of a row; all lanes of the row's team call it
template <typename Team, int kMostDim, typename Put>
__device__ __forceinline__ void encode_groups(Team team, const BitRows<kMostDim>& rows, const HeadRows& head,
                                              const RowSegment& segment, unsigned finite, Put put, int lane) {
  const bool affine = segment.kind == CodeKind::affine;
  // Symmetric codes of a trellis coder take its rule if they have it.
  const ScaleRule uniform_rule = rows.rule == ScaleRule::rms ? ScaleRule::norm : rows.rule;
  const int count = segment.group_size;
  for (int g = 0; g < segment.place.channels / count; ++g) {
    const int first = segment.place.first_channel + g * count, number = segment.first_number + g;
    if (segment.kind == CodeKind::codebook || segment.kind == CodeKind::trellis) {
      const unsigned scale = encode_searched<Team>(rows, segment, first, lane);
      if (team.row < rows.count) put(team.row, number, scale);
      continue;
    }
    for (int r = 0; r < rows.count; ++r) {
      if (!(finite >> r & 1u)) continue;
      const GroupNumbers found = encode_uniform<kMostDim>(
          rows.x_of(r) + first, {segment.place.bits, count, affine, rows.side.integer_zero, uniform_rule}, rows.type,
          rows.codes_of(r) + first, lane);
      put(r, number, found.scale);
      if (affine) put(r, head.groups + number, found.second);
    }
  }
}

/// Stores a number of a token's row. One lane calls it.
__device__ __forceinline__ void put_number(std::byte* tile, const TileSide& side, int token, int number,
                                           unsigned bits) {
  store_number(tile + number_offset(side, token, 0, number), side, bits);
}

/// Clears the codes of rows that are not finite, and stores the numbers that no group has. All lanes of a warp call it.
/// @param tile, token  code_bit_rows()
template <typename Team, int kMostDim>
__device__ __forceinline__ void finish_rows(Team team, const BitRows<kMostDim>& rows, const HeadRows& head,
                                            bool one_scale, unsigned finite, std::byte* tile, int token) {
  const bool affine = head.num_segments > 0 && head.segments[0].kind == CodeKind::affine;
  const int used = one_scale ? min(1, head.num_segments) : affine ? 2 * head.groups : head.groups;
  const bool is_finite_team = finite >> team.row & 1u;
  if (!is_finite_team) team.for_each(rows.dim, [&](int c) { rows.codes_of(team.row)[c] = 0; });
  if (tile == nullptr) return;
  for (int i = is_finite_team ? used + team.lane : team.lane; i < rows.side.numbers; i += Team::kWidth)
    put_number(tile, rows.side, token, i, i < used ? quiet_nan(rows.type) : 0);
}

/// Quantizes rows of bit tiles and stores them. All lanes of a warp call it; it ends with a barrier.
/// @param tile   of the team's row; null: it is not stored
/// @param token  of the team's row in the tile
/// @return       finite_rows()
template <typename Team, int kMostDim>
__device__ __forceinline__ unsigned code_bit_rows(Team team, const BitRows<kMostDim>& rows, const HeadRows& head,
                                                  const RowCode& code, bool value, int clip_rank, std::byte* tile,
                                                  int token, int lane) {
  const unsigned finite = finite_rows(team, rows);
  const auto put = [&](int row, int number, unsigned bits) {
    if (tile != nullptr && lane == row * Team::kWidth && (finite >> row & 1u))
      put_number(tile, rows.side, token, number, bits);
  };
  if (code.one_scale) {
    if (head.num_segments > 0) put(team.row, 0, encode_with_row_scale<Team>(rows, head, lane));
  } else {
    for (int r = 0; clip_rank > 0 && r < rows.count; ++r)
      if (finite >> r & 1u) clip_row<kMostDim>(rows.x_of(r), rows.dim, clip_rank, lane);
    for (int s = 0; s < head.num_segments; ++s) encode_groups(team, rows, head, head.segments[s], finite, put, lane);
  }
  __syncwarp();
  finish_rows(team, rows, head, code.one_scale, finite, tile, token);
  store_bits(team, rows, head, value, tile, token);
  __syncwarp();
  return finite;
}

}  // namespace kvq::generic
