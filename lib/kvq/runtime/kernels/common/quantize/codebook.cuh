#pragma once

#include <kvq/plan/scheme.h>
#include <kvq/plan/table_layout.h>
#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/device/compare.cuh>
#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/common/quantize/boundaries.cuh>
#include <kvq/runtime/kernels/common/quantize/encode.cuh>
#include <kvq/runtime/kernels/common/quantize/store.cuh>

/// Quantizes rows that are one group of codebook codes, bit for bit as packing.md says, and stores them in bit tiles
/// (formats/pages.md). A warp lays its 16 tokens out as a tile in shared memory first, because the bits of a stored
/// word come from four lanes.
namespace kvq::write {

/// The format of one side whose rows are such a group, with an fp16 scale.
template <int kDim, int kBitsArg>
struct CodebookSide {
  static constexpr int kHeadDim = kDim, kBits = kBitsArg, kGroup = kDim, kGroups = 1, kStepsInGroup = kDim / 32;
  static constexpr bool kExact = false, kAffine = false, kBfloat = false, kCodebook = true;
  static_assert(kDim % kUnitChannels == 0 && kBits >= 2 && kBits <= 4);
  KVQ_HD static constexpr TileSide side() { return codebook_tiles(kDim, kBits); }
};
template <typename Side>
concept IsCodebook = requires { requires Side::kCodebook; };

/// A head's codebook, in shared memory.
template <int kBits>
struct CodebookTables {
  static constexpr int kEntries = 1 << kBits;
  double factors[kEntries];  ///< boundary_factor() of each threshold; the last one is not used
  float squares[kEntries];   ///< of the entries

  /// All lanes of a warp call it; a barrier has to follow.
  __device__ __forceinline__ void load(const RowCode& code, int head, int lane) {
    const float* table = code.tables + __ldg(&code.heads[head].segments[0].table);
    if (lane >= kEntries) return;
    const float entry = __ldg(table + lane);
    squares[lane] = __fmul_rn(entry, entry);
    factors[lane] = lane < kEntries - 1 ? boundary_factor(__ldg(table + kEntries + lane)) : 0.0;
  }
};

/// Shared memory of a warp.
template <typename Side>
struct CodebookScratch {
  alignas(16) std::byte tile[Side::side().bytes()];
  alignas(16) float boundaries[8][1 << Side::kBits];  ///< of eight tokens: boundary() of each threshold
};

/// A code and what its bits are made of, as floats, because additions of floats leave the pipe of comparisons free.
template <int kBits>
struct CountedCode {
  static constexpr bool kHasTop = kBits > 2;
  static constexpr int kLow = kHasTop ? kBits - 1 : kBits;
  float low[kLow];  ///< [i]: the code without the highest bit, if kHasTop, and without the lowest i ones
  float top;        ///< the highest bit

  __device__ __forceinline__ float code() const { return kHasTop ? fmaf(top, 1 << kLow, low[0]) : low[0]; }
};

/// Counts the boundaries up to x. Of 7 or 15 boundaries, the middle one decides which half of the others is left.
template <int kBits>
__device__ __forceinline__ CountedCode<kBits> count_boundaries(float x, const float (&boundaries)[1 << kBits]) {
  constexpr int kLow = CountedCode<kBits>::kLow, kCompared = (1 << kLow) - 1;
  CountedCode<kBits> result;
  const bool is_upper = CountedCode<kBits>::kHasTop && x >= boundaries[kCompared];
  result.top = is_upper ? 1.0f : 0.0f;
  float reached[kCompared];
#pragma unroll
  for (int i = 0; i < kCompared; ++i) {
    if constexpr (CountedCode<kBits>::kHasTop)
      reached[i] = ptx::at_least(x, is_upper ? boundaries[kCompared + 1 + i] : boundaries[i]);
    else
      reached[i] = ptx::at_least(x, boundaries[i]);
  }
  // Without its lowest i bits, a count of ascending boundaries is that of each 2^i-th of them.
#pragma unroll
  for (int i = kLow - 1; i >= 0; --i) {
    result.low[i] = reached[(1 << i) - 1];
    if (i < kLow - 1) result.low[i] += result.low[i + 1];
#pragma unroll
    for (int k = 3 << i; k <= kCompared; k += 2 << i) result.low[i] += reached[k - 1];
  }
  return result;
}

/// The lowest byte of an integer below 2^23.
__device__ __forceinline__ std::byte byte_of(float x) {
  return static_cast<std::byte>(__float_as_uint(x + 8388608.0f) & 0xFFu);
}

/// Stores a lane's codes of a step, the channels 32 j + 8 t + e, in the tile. A stored byte has bits of several codes.
/// A sum of codes times powers of two puts these bits in place; higher bits of the codes that fall on the same places
/// are subtracted.
/// @param token  of the tile
template <typename Side>
__device__ __forceinline__ void lay_out(const CountedCode<Side::kBits> (&codes)[8], std::byte* tile, int token,
                                        bool value, int j, int t) {
  constexpr TileSide kSide = Side::side();
  constexpr int kBits = Side::kBits, kLow = CountedCode<kBits>::kLow;
  const auto sum = [&](int first, int count, float base, auto term) {
    float result = term(codes[first]), weight = base;
#pragma unroll
    for (int e = 1; e < count; ++e, weight *= base) result = fmaf(term(codes[first + e]), weight, result);
    return result;
  };
  if (!value) {
    const auto put = [&](int bit, float plane) {
      tile[key_word_offset(kSide, token, j * kBits + bit) + t] = byte_of(plane);
    };
    float above = 0.0f;
#pragma unroll
    for (int i = kLow - 1; i >= 0; --i) {
      const float of = sum(0, 8, 2.0f, [&](const auto& code) { return code.low[i]; });
      put(i, i == kLow - 1 ? of : fmaf(above, -2.0f, of));
      above = of;
    }
    if constexpr (CountedCode<kBits>::kHasTop)
      put(kBits - 1, sum(0, 8, 2.0f, [](const auto& code) { return code.top; }));
    return;
  }
  const auto put = [&](int byte, float x) { tile[value_byte_offset(kSide, token, 4 * kBits * j + byte)] = byte_of(x); };
  if constexpr (kBits == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) put(4 * t + i, sum(2 * i, 2, 16.0f, [](const auto& code) { return code.code(); }));
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      put(2 * t + half, sum(4 * half, 4, 4.0f, [](const auto& code) { return code.low[0]; }));
    if constexpr (kBits == 3) put(8 + t, sum(0, 8, 2.0f, [](const auto& code) { return code.top; }));
  }
}

/// Makes the codes of a token's row and stores them in the tile. All lanes of the warp call it.
/// @param squares  CodebookTables::squares
/// @param token    of the tile
/// @return  the sum of squares of the codes' entries
template <typename Side>
__device__ __forceinline__ float encode_codebook(const float (&x)[Side::kHeadDim / 32][8], const float* squares,
                                                 CodebookScratch<Side>& scratch, int token, bool value, int lane) {
  constexpr int kEntries = 1 << Side::kBits;
  float boundaries[kEntries];
#pragma unroll
  for (int i = 0; i < kEntries; i += 4) {
    const auto four = *reinterpret_cast<const float4*>(scratch.boundaries[lane / 4] + i);
    boundaries[i] = four.x, boundaries[i + 1] = four.y, boundaries[i + 2] = four.z, boundaries[i + 3] = four.w;
  }
  // An address is an integer: the bits of a float that is so small are that number, times 2^-149.
  const float first_square = __uint_as_float(ptx::shared_address(squares));
  return tree_sum_of_steps<Side>(0, [&](int j, float(&y)[8]) {
    CountedCode<Side::kBits> codes[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      codes[e] = count_boundaries<Side::kBits>(x[j][e], boundaries);
      y[e] = __uint_as_float(ptx::ld_shared(__float_as_uint(fmaf(codes[e].code(), 0x4p-149f, first_square))));
    }
    lay_out<Side>(codes, scratch.tile, token, value, j, lane & 3);
  });
}

/// Stores a tile from shared memory where its tokens go. All lanes of the warp call it.
/// @param slots    lane i has the destination of token i, i = 0..15; negative: not stored
/// @param tile_of  slot -> first byte of the slot's tile
template <typename Side, typename TileOf>
__device__ __forceinline__ void store_tile(const std::byte* tile, std::int64_t slots, TileOf tile_of, bool value,
                                           int lane) {
  constexpr TileSide kSide = Side::side();
  static_assert(kSide.bytes() % 16 == 0);
  const auto first = static_cast<std::int64_t>(__shfl_sync(kAll, static_cast<long long>(slots), 0));
  const bool in_tile_order = lane >= kTileTokens || slots == first + lane;
  if (__all_sync(kAll, in_tile_order) && first >= 0 && first % kTileTokens == 0) {
    const auto* from = reinterpret_cast<const uint4*>(tile);
    auto* to = reinterpret_cast<uint4*>(tile_of(first));
#pragma unroll
    for (int i = 0; i < kSide.bytes() / 16; i += 32)
      if (i + lane < kSide.bytes() / 16) to[i + lane] = from[i + lane];
    return;
  }
#pragma unroll 1
  for (int token = 0; token < kTileTokens; ++token) {
    const auto slot = static_cast<std::int64_t>(__shfl_sync(kAll, static_cast<long long>(slots), token));
    if (slot < 0) continue;
    std::byte* to = tile_of(slot);
    const int at = static_cast<int>(slot) & (kTileTokens - 1);
    if (value) {
      for (int y = lane; y < 4 * kSide.row_words; y += 32)
        to[value_byte_offset(kSide, at, y)] = tile[value_byte_offset(kSide, token, y)];
    } else if (lane < kSide.row_words) {
      *reinterpret_cast<unsigned*>(to + key_word_offset(kSide, at, lane)) =
          *reinterpret_cast<const unsigned*>(tile + key_word_offset(kSide, token, lane));
    }
    if (lane == 0)
      *reinterpret_cast<unsigned short*>(to + number_offset(kSide, at, 0, 0)) =
          *reinterpret_cast<const unsigned short*>(tile + number_offset(kSide, token, 0, 0));
  }
}

/// Quantizes one warp's rows and stores them in pages.
/// @param tables   of the head
/// @param rule     norm or rms
/// @param slots    see store_tile()
/// @param memory   room for a CodebookScratch, aligned to 16 bytes; what lanes read there before may be overwritten
template <typename Side, typename TileOf>
__device__ __forceinline__ void quantize_codebook_rows(Rows<Side>& rows, const CodebookTables<Side::kBits>& tables,
                                                       ScaleRule rule, std::int64_t slots, TileOf tile_of, bool value,
                                                       std::byte* memory, int lane) {
  using Scratch = CodebookScratch<Side>;
  constexpr int kEntries = 1 << Side::kBits;
  auto& scratch = *reinterpret_cast<Scratch*>(memory);
  float energies[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    auto& x = rows.x[r];
#pragma unroll
    for (int j = 0; j < Rows<Side>::kSteps; ++j)
#pragma unroll
      for (int e = 0; e < 8; ++e) x[j][e] *= rows.row_scale;
    energies[r] = tree_sum<Side>(0, [&](int j, int e) { return __fmul_rn(x[j][e], x[j][e]); });
  }
  // What follows from sums is computed for both rows at once: lanes with an odd t have that of the token g + 8.
  const int t = lane & 3, own_row = t & 1;
  const float energy = own_row ? energies[1] : energies[0];
  bool finite = true;
  if (!__all_sync(kAll, is_finite(energy))) {
    const bool first = is_finite_row(rows.x[0]), second = is_finite_row(rows.x[1]);
    finite = own_row ? second : first;
  }
  unsigned short rms_bits, norm_bits;
  const float scale = stored<Side::kBfloat>(__fsqrt_rn(__fdiv_rn(energy, static_cast<float>(Side::kGroup))), rms_bits);
  float own_squares = 0.0f;
#pragma unroll 1  // so that the code stays in the instruction cache
  for (int r = 0; r < 2; ++r) {
    const float of_row = __shfl_sync(kAll, finite ? scale : __int_as_float(0x7FC00000), (lane & ~3) | r);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kEntries; k += 4) {
      const int i = k + t;
      // Codes are 2^(b-1) if the scale is 0, and 0 if a row is not finite.
      float least = boundary(tables.factors[i], of_row);
      if (!(of_row > 0.0f))
        least = of_row == 0.0f ? __int_as_float(i < kEntries / 2 ? 0xFF800000 : 0x7F800000) : of_row;
      scratch.boundaries[lane / 4][i] = least;
    }
    __syncwarp();
    const float squares = encode_codebook<Side>(rows.x[0], tables.squares, scratch, lane / 4 + 8 * r, value, lane);
    if (r == own_row) own_squares = squares;
#pragma unroll
    for (int j = 0; j < Rows<Side>::kSteps; ++j)
#pragma unroll
      for (int e = 0; e < 8; ++e) rows.x[0][j][e] = rows.x[1][j][e];
  }
  stored<Side::kBfloat>(__fsqrt_rn(__fdiv_rn(energy, own_squares)), norm_bits);
  if (t < 2) {
    const bool is_norm = rule == ScaleRule::norm && own_squares > 0.0f;
    const unsigned short bits = !finite ? 0x7E00 : !(scale > 0.0f) ? 0 : is_norm ? norm_bits : rms_bits;
    *reinterpret_cast<unsigned short*>(scratch.tile + number_offset(Side::side(), lane / 4 + 8 * t, 0, 0)) = bits;
  }
  __syncwarp();
  store_tile<Side>(scratch.tile, slots, tile_of, value, lane);
  __syncwarp();
}

}  // namespace kvq::write
