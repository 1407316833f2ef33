#pragma once

#include <kvq/plan/segment_layout.h>
#include <kvq/runtime/kernels/common/centroids.cuh>
#include <kvq/runtime/kernels/common/quantize/codebook.cuh>

#include <type_traits>

/// Quantizes keys that are segments of codebook codes, bit for bit as packing.md says, with a scale for each segment or
/// one for the row, and stores them in bit tiles (formats/pages.md). Segments begin at any channel. So a warp puts some
/// of its rows into shared memory at a time, and as many lanes quantize each: a lane has neighboring channels of a
/// segment, whose sums are neighbors in the tree of sums, too. Eight rows at a time, with four lanes each, take fewer
/// instructions; two rows with 16 lanes each are ready sooner and need less shared memory.
namespace kvq::write {

/// Keys of mixed widths with fp16 scales. The numbers of words and scales of a row come with the call.
/// @tparam kRowsArg  rows of a warp at a time: 2 or 8
template <int kDim, int kRowsArg>
struct SegmentSide {
  static constexpr int kHeadDim = kDim, kRows = kRowsArg;
  static constexpr bool kExact = false, kBfloat = false, kSegments = true;
  /// Kernels take from it only what does not depend on the numbers of words and scales.
  KVQ_HD static constexpr TileSide side() { return {.head_dim = kDim, .bits = 0, .group_size = kDim, .row_words = 1}; }
};
template <typename Side>
concept HasSegments = requires { requires Side::kSegments; };
template <typename Side>
concept QuantizesTwoRows = HasSegments<Side> && Side::kRows == 2;

/// A segment as lanes read it.
struct SegmentCode {
  int bits, first_channel, channels;
  std::uint16_t first_bit, number;  ///< number: of its scale
};

/// Shared memory of a warp. @tparam kRowsArg  of SegmentSide
template <int kDim, int kRowsArg>
struct SegmentScratch {
  static constexpr int kRows = kRowsArg, kLanes = 32 / kRows;  ///< kLanes: of a row
  static constexpr int kEntries = 1 << kMostLevelBits;
  /// Floats of a row: gaps behind each 32 channels spread the channels that lanes read at once over banks.
  static constexpr int kGap = kRows == 2 ? 4 : 8, kRowFloats = kDim + kGap * (kDim / 32) + (kRows == 2 ? 0 : 1);
  float x[kRows][kRowFloats];
  float tables[kMostSegments][2 * kEntries];  ///< entries; then thresholds, NaN behind the last one
  float gains[kMostSegments];
  SegmentCode segments[kMostSegments];
  alignas(4) std::uint8_t codes[kRows][kDim + 8];  ///< what lies behind the last channel is read and not used

  static __device__ __forceinline__ int place(int channel) { return channel + channel / 32 * kGap; }
};

/// Reads a head's segments into shared memory. All lanes of the warp call it. @return  number of segments
template <typename Scratch>
__device__ __forceinline__ int load_segments(const HeadRows& head, const float* tables, Scratch& scratch, int lane) {
  constexpr int kEntries = Scratch::kEntries;
  const int count = min(__ldg(&head.num_segments), kMostSegments);
  int own_bits = 0, own_table = 0;
  if (lane < kMostSegments) {  // those behind the last one are there, too
    const RowSegment& from = head.segments[lane];
    own_bits = __ldg(&from.place.bits), own_table = __ldg(&from.table);
    scratch.segments[lane] = {own_bits, __ldg(&from.place.first_channel), __ldg(&from.place.channels),
                              static_cast<std::uint16_t>(__ldg(&from.place.first_bit)),
                              static_cast<std::uint16_t>(__ldg(&from.first_number))};
    scratch.gains[lane] = __ldg(&from.gain);
  }
#pragma unroll  // so that the loads of all tables are in flight at once
  for (int s = 0; s < kMostSegments; ++s) {
    const int entries = 1 << __shfl_sync(kAll, own_bits, s), i = lane % kEntries;
    const float* table = tables + __shfl_sync(kAll, own_table, s);
    const bool is_threshold = lane >= kEntries;
    float x = __int_as_float(0x7FC00000);
    if (s < count && i < entries - is_threshold) x = __ldg(table + (is_threshold ? entries : 0) + i);
    scratch.tables[s][lane] = x;
  }
  return count;
}

/// Sum over a segment of kLanes lanes, in the order of packing.md. A group is padded with zeros: lanes and channels
/// that it does not have count nothing.
template <int kLanes, int kEach>
__device__ __forceinline__ float sum_of_row(float (&y)[kEach]) {
#pragma unroll
  for (int width = 1; width < kEach; width *= 2)
#pragma unroll
    for (int i = 0; i < kEach; i += 2 * width) y[i] = __fadd_rn(y[i], y[i + width]);
  float sum = y[0];
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kAll, sum, step));
  return sum;
}

/// Calls f(std::integral_constant<int, kEach>), kEach being the channels of a lane.
template <int kLanes, typename F>
__device__ __forceinline__ void with_channels_of_lane(int channels, F f) {
  if (channels <= 16)
    f(std::integral_constant<int, 16 / kLanes>{});
  else if (channels <= 32)
    f(std::integral_constant<int, 32 / kLanes>{});
  else if (channels <= 64)
    f(std::integral_constant<int, 64 / kLanes>{});
  else
    f(std::integral_constant<int, 128 / kLanes>{});
}

/// A row of the pass, of one lane.
template <typename Scratch>
struct SegmentRow {
  static constexpr int kLanes = Scratch::kLanes;
  Scratch& scratch;
  int row, lane;  ///< lane: of those of the row

  /// The lane's channels of a segment; 0 behind the last one.
  template <int kEach>
  __device__ __forceinline__ void load(const SegmentCode& segment, float (&x)[kEach]) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int c = lane * kEach + i;
      x[i] = c < segment.channels ? scratch.x[row][Scratch::place(segment.first_channel + c)] : 0.0f;
    }
  }
  template <int kEach>
  static __device__ __forceinline__ float sum_of_squares(const float (&x)[kEach]) {
    float squares[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) squares[i] = __fmul_rn(x[i], x[i]);
    return sum_of_row<kLanes>(squares);
  }
  __device__ __forceinline__ float energy(const SegmentCode& segment) const {
    float result = 0.0f;
    with_channels_of_lane<kLanes>(segment.channels, [&](auto each) {
      float x[each.value];
      load(segment, x);
      result = sum_of_squares(x);
    });
    return result;
  }

  /// Puts the codes of a segment's y into shared memory. @param y  x / scale  @param no_scale  the scale is 0
  /// @return  the sum of squares of the codes' entries
  template <int kEach>
  __device__ __forceinline__ float encode(int s, const SegmentCode& segment, const float (&y)[kEach],
                                          bool no_scale) const {
    constexpr float kMagic = 8388608.0f;  // 2^23: codes are counted in the low bits of floats, see encode_codebook()
    float counts[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) counts[i] = kMagic;
    const auto* thresholds = reinterpret_cast<const float4*>(scratch.tables[s] + Scratch::kEntries);
#pragma unroll 1
    for (int four = 0; four < 1 << segment.bits; four += 4) {
      const float4 of = thresholds[four / 4];
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        counts[i] += (ptx::at_least(y[i], of.x) + ptx::at_least(y[i], of.y)) +
                     (ptx::at_least(y[i], of.z) + ptx::at_least(y[i], of.w));
    }
    float squares[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int c = lane * kEach + i;
      const unsigned code = no_scale ? 1u << (segment.bits - 1) : __float_as_uint(counts[i]) & 0xFFu;
      squares[i] = 0.0f;
      if (c >= segment.channels) continue;
      scratch.codes[row][segment.first_channel + c] = static_cast<std::uint8_t>(code);
      const float entry = scratch.tables[s][code];
      squares[i] = __fmul_rn(entry, entry);
    }
    return sum_of_row<kLanes>(squares);
  }

  /// Quantizes a segment with a scale of its own. @return  the scale's bits
  __device__ __forceinline__ unsigned encode_with_own_scale(int s, ScaleRule rule) const {
    const SegmentCode segment = scratch.segments[s];
    unsigned short rms_bits = 0, norm_bits = 0;
    float scale = 0.0f, n = 0.0f;
    with_channels_of_lane<kLanes>(segment.channels, [&](auto each) {
      float x[each.value];
      load(segment, x);
      const float energy = sum_of_squares(x);
      scale = stored<false>(__fsqrt_rn(__fdiv_rn(energy, static_cast<float>(segment.channels))), rms_bits);
      const float reciprocal = scale > 0.0f ? __frcp_rn(scale) : 0.0f;
#pragma unroll
      for (float& of : x) of = divide(of, scale, reciprocal);
      n = encode(s, segment, x, scale == 0.0f);
      stored<false>(__fsqrt_rn(__fdiv_rn(energy, n)), norm_bits);
    });
    if (scale == 0.0f) return 0;
    return rule == ScaleRule::norm && n > 0.0f ? norm_bits : rms_bits;
  }

  /// Quantizes a row with one scale (packing.md, "One scale a row"). @return  the scale's bits
  __device__ __forceinline__ unsigned encode_with_one_scale(int num_segments, ScaleRule rule) const {
    generic::SumOfSegments length, normalized, squares;
    int channels = 0;
#pragma unroll 1
    for (int s = 0; s < num_segments; ++s) {
      const SegmentCode segment = scratch.segments[s];
      const float gain = scratch.gains[s], of_segment = energy(segment);
      length.add(of_segment), normalized.add(__fdiv_rn(of_segment, __fmul_rn(gain, gain)));
      channels += segment.channels;
    }
    unsigned short bits = 0, norm_bits = 0;
    const float d = stored<false>(__fsqrt_rn(__fdiv_rn(normalized.value, static_cast<float>(channels))), bits);
#pragma unroll 1
    for (int s = 0; s < num_segments; ++s) {
      const SegmentCode segment = scratch.segments[s];
      const float gain = scratch.gains[s], t = __fmul_rn(gain, d);
      with_channels_of_lane<kLanes>(segment.channels, [&](auto each) {
        float x[each.value];
        load(segment, x);
#pragma unroll
        for (float& of : x) of = __fdiv_rn(of, t);
        squares.add(__fmul_rn(__fmul_rn(gain, gain), encode(s, segment, x, t == 0.0f)));
      });
    }
    if (d == 0.0f) return 0;
    if (rule == ScaleRule::rms || squares.value == 0.0f) return bits;
    const float norm = __fsqrt_rn(__fdiv_rn(length.value, squares.value));
    stored<false>(norm, norm_bits);
    return norm == norm ? norm_bits : bits;
  }
};

/// The words of a row, at most kMostWords: its lane number i has the words i, i + kLanes, ...
template <typename Scratch>
struct RowWords {
  static constexpr int kLanes = Scratch::kLanes, kMostWords = 16, kEach = kUnitChannels / kLanes;
  unsigned of_lane[kMostWords / kLanes] = {};

  /// Calls f(segment, channels of the unit, its first channel, its first bit) for each unit of the row's segments.
  template <typename F>
  static __device__ __forceinline__ void for_each_unit(const Scratch& scratch, int num_segments, F f) {
#pragma unroll 1
    for (int s = 0; s < num_segments; ++s) {
      const SegmentCode segment = scratch.segments[s];
      int at = segment.first_bit;
#pragma unroll 1
      for (int first = 0; first < segment.channels; first += kUnitChannels) {
        const int channels = min(kUnitChannels, segment.channels - first);
        f(segment, channels, segment.first_channel + first, at);
        at += segment.bits * channels;
      }
    }
  }
  /// With two rows, a vote of the warp is a plane of 32 codes. All lanes of a warp call it.
  __device__ __forceinline__ void pack_by_votes(const SegmentRow<Scratch>& own, int num_segments, int lane) {
    for_each_unit(own.scratch, num_segments, [&](const SegmentCode& segment, int channels, int first, int at) {
      const bool is_there = lane < channels;
      const unsigned low = is_there ? own.scratch.codes[0][first + lane] : 0u,
                     high = is_there ? own.scratch.codes[1][first + lane] : 0u;
#pragma unroll 1
      for (int bit = 0; bit < segment.bits; ++bit, at += channels) {
        const unsigned of_low = __ballot_sync(kAll, static_cast<int>(low >> bit & 1u)),
                       of_high = __ballot_sync(kAll, static_cast<int>(high >> bit & 1u));
        put(own.row == 0 ? of_low : of_high, at, own.lane);
      }
    });
  }
  /// With eight rows, a lane has kEach neighboring codes of a unit. All lanes of a warp call it.
  __device__ __forceinline__ void pack_by_lanes(const SegmentRow<Scratch>& own, int num_segments) {
    for_each_unit(own.scratch, num_segments, [&](const SegmentCode& segment, int channels, int first, int at) {
      const int count = min(max(channels - own.lane * kEach, 0), kEach);  // of the lane
      const int c = count > 0 ? first + own.lane * kEach : 0;
      const auto* words = reinterpret_cast<const unsigned*>(own.scratch.codes[own.row]) + c / 4;
      unsigned fours[kEach / 4];
#pragma unroll
      for (int w = 0; w < kEach / 4; ++w) fours[w] = __funnelshift_r(words[w], words[w + 1], c % 4 * 8);
      const unsigned mask = (1u << count) - 1;
#pragma unroll 1
      for (int bit = 0; bit < segment.bits; ++bit, at += channels) {
        unsigned plane = 0;
#pragma unroll
        for (int w = 0; w < kEach / 4; ++w) plane |= ((fours[w] >> bit & 0x01010101u) * 0x01020408u >> 24) << (4 * w);
        plane = (plane & mask) << (kEach * own.lane);
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2) plane |= __shfl_xor_sync(kAll, plane, step);
        put(plane, at, own.lane);
      }
    });
  }
  /// Puts a plane of bits at a bit of the row.
  __device__ __forceinline__ void put(unsigned plane, int at, int lane) {
    const int shift = at % 32;
#pragma unroll
    for (int k = 0; k < kMostWords / kLanes; ++k) {
      const int distance = lane + k * kLanes - at / 32;
      if (distance == 0) of_lane[k] |= plane << shift;
      if (distance == 1) of_lane[k] |= __funnelshift_l(plane, 0, shift);
    }
  }
};

/// Quantizes one warp's keys and stores them in pages.
/// @param code     of the keys
/// @param side     their tiles
/// @param slots    lane i has the destination of token i, i = 0..15; negative: not stored
/// @param tile_of  slot -> first byte of the slot's tile
/// @param memory   room for a SegmentScratch, aligned to 16 bytes; what lanes read there before may be overwritten
template <typename Side, typename TileOf>
__device__ __forceinline__ void quantize_segment_rows(Rows<Side>& rows, const RowCode& code, ScaleRule rule, int head,
                                                      const TileSide& side, std::int64_t slots, TileOf tile_of,
                                                      std::byte* memory, int lane) {
  using Scratch = SegmentScratch<Side::kHeadDim, Side::kRows>;
  constexpr int kLanes = Scratch::kLanes;
  auto& scratch = *reinterpret_cast<Scratch*>(memory);
  const HeadRows& of_head = code.heads[head];
  __syncwarp();
  const int num_segments = load_segments(of_head, code.tables, scratch, lane);
  const int used = code.one_scale ? min(1, num_segments) : __ldg(&of_head.groups);
  unsigned finite = 0;  // bit r: of the tokens g and g + 8
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int j = 0; j < Rows<Side>::kSteps; ++j)
#pragma unroll
      for (int e = 0; e < 8; ++e) rows.x[r][j][e] *= rows.row_scale;
    finite |= is_finite_row(rows.x[r]) ? 1u << r : 0u;
  }
  const SegmentRow<Scratch> own{scratch, lane / kLanes, lane % kLanes};
#pragma unroll 1
  for (int pass = 0; pass < kTileTokens / Scratch::kRows; ++pass) {
    // Two rows are the tokens g and g + 8, of which four lanes have channels; eight are those of all lanes.
    constexpr bool kTwo = Scratch::kRows == 2;
    const int of_pass = kTwo ? pass + 8 * own.row : 8 * pass + own.row;  // the row's token
    const auto slot = static_cast<std::int64_t>(__shfl_sync(kAll, static_cast<long long>(slots), of_pass));
    const bool is_used = __any_sync(kAll, slot >= 0);
    __syncwarp();
    if (is_used && (!kTwo || lane >> 2 == pass)) {
#pragma unroll
      for (int r = 0; r < (kTwo ? 2 : 1); ++r)
#pragma unroll
        for (int j = 0; j < Rows<Side>::kSteps; ++j)
#pragma unroll
          for (int e = 0; e < 8; ++e)
            scratch.x[kTwo ? r : lane >> 2][scratch.place(32 * j + 8 * (lane & 3)) + e] = rows.x[r][j][e];
    }
    const bool is_finite = __shfl_sync(kAll, finite, kTwo ? 4 * pass : lane) >> (kTwo ? own.row : pass) & 1u;
    if constexpr (!kTwo) {
#pragma unroll
      for (int j = 0; j < Rows<Side>::kSteps; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e) rows.x[0][j][e] = rows.x[1][j][e];
    }
    if (!is_used) continue;
    __syncwarp();
    unsigned scale = 0;  // of the lane's number
    if (code.one_scale && num_segments > 0) {
      const unsigned bits = own.encode_with_one_scale(num_segments, rule);
      if (own.lane == 0) scale = bits;
    } else {
#pragma unroll 1
      for (int s = 0; s < num_segments; ++s) {
        const unsigned bits = own.encode_with_own_scale(s, rule);
        if (own.lane == scratch.segments[s].number) scale = bits;
      }
    }
    __syncwarp();
    RowWords<Scratch> words;
    if constexpr (kTwo)
      words.pack_by_votes(own, num_segments, lane);
    else
      words.pack_by_lanes(own, num_segments);
    if (slot >= 0) {
      std::byte* tile = tile_of(slot);
      const int token = static_cast<int>(slot) & (kTileTokens - 1);
#pragma unroll
      for (int k = 0; k < RowWords<Scratch>::kMostWords / kLanes; ++k)
        if (const int w = own.lane + k * kLanes; w < side.row_words)
          *reinterpret_cast<unsigned*>(tile + key_word_offset(side, token, w)) = is_finite ? words.of_lane[k] : 0u;
      if (own.lane < side.numbers)
        *reinterpret_cast<unsigned short*>(tile + number_offset(side, token, 0, own.lane)) =
            static_cast<unsigned short>(is_finite         ? scale
                                        : own.lane < used ? 0x7E00u
                                                          : 0u);
    }
  }
  __syncwarp();
}
static_assert(kMostSegments <= 4);  // each number of a row has a lane

}  // namespace kvq::write
