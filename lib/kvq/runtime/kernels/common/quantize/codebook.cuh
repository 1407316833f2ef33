#pragma once

#include <kvq/plan/scheme.h>
#include <kvq/plan/table_layout.h>
#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/device/compare.cuh>
#include <kvq/device/ptx.cuh>
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

/// A head's codebook, in shared memory. 32 bins of equal length lie between the outermost thresholds: the bin of a
/// quotient x / scale tells the one threshold that is left to compare with, and the code below it.
template <int kBits>
struct CodebookTables {
  static constexpr int kEntries = 1 << kBits, kThresholds = kEntries - 1, kBins = 32;
  struct alignas(8) Bin {
    float threshold;  ///< NaN: the bin has none
    unsigned below;   ///< address of the entry of the code below the threshold
  };
  struct alignas(8) Entry {
    float square;   ///< of the codebook's entry
    unsigned bits;  ///< of the code, where lay_out() wants them
  };
  Bin bins[kBins];
  Entry entries[kEntries];
  float thresholds[kEntries];  ///< the last one is not used
  float to_place;              ///< half the reciprocal of the largest magnitude of a threshold
  float margin;                ///< quotients are estimated; those so near a threshold are computed. Infinite: all are

  /// Bit i of a code of a key is bit 8 i. Of a value of 3 bits the highest one is bit 16.
  static __device__ __forceinline__ unsigned spread(unsigned code, bool value) {
    if (value) return kBits == 3 ? (code & 3u) | (code >> 2) << 16 : code;
    unsigned result = 0;
#pragma unroll
    for (int i = 0; i < kBits; ++i) result |= (code >> i & 1u) << (8 * i);
    return result;
  }

  /// All lanes of a warp call it; a barrier has to follow.
  __device__ __forceinline__ void load(const RowCode& code, int head, bool value, int lane) {
    // Neighboring bins overlap by more than an estimate may be wrong: 31 is a quotient's largest place, so its error is
    // below 2^-17 bins.
    constexpr float kHalfBin = 0.5f + 0x1p-12f;
    const float* table = code.tables + __ldg(&code.heads[head].segments[0].table);
    const float threshold = lane < kThresholds ? __ldg(table + kEntries + lane) : 0.0f;
    const float largest =
        fmaxf(fabsf(__shfl_sync(kAll, threshold, 0)), fabsf(__shfl_sync(kAll, threshold, kThresholds - 1)));
    const float length = largest * (2.0f / (kBins - 1)), place = static_cast<float>(lane);
    const float low = lane == 0 ? kMinusInf : fmaf(place - kHalfBin, length, -largest),
                high = lane == kBins - 1 ? -kMinusInf : fmaf(place + kHalfBin, length, -largest);
    int below = 0, inside = 0;
    float found = __int_as_float(0x7FC00000);
#pragma unroll 1
    for (int i = 0; i < kThresholds; ++i) {
      const float other = __shfl_sync(kAll, threshold, i);
      if (other < low) ++below;
      if (other >= low && other <= high) ++inside, found = other;
    }
    const bool is_usable = __all_sync(kAll, inside <= 1 && largest > 0.0f);
    bins[lane] = {found, ptx::shared_address(entries + below)};
    if (lane < kEntries) {
      const float entry = __ldg(table + lane);
      entries[lane] = {__fmul_rn(entry, entry), spread(static_cast<unsigned>(lane), value)};
      thresholds[lane] = threshold;
    }
    if (lane == 0) to_place = 0.5f / largest, margin = is_usable ? largest * 0x1p-21f : -kMinusInf;
  }
};

/// Shared memory of a warp.
template <typename Side>
struct CodebookScratch {
  alignas(16) std::byte tile[Side::side().bytes()];
};

/// Addresses are computed as floats, because additions of floats leave the pipe of integers free: the bits of a float
/// that is so small are a number times 2^-149.
constexpr float kEight = 0x8p-149f;

/// Finds the entries of the codes of eight channels: as packing.md (c) says, a code is the number of thresholds that
/// x / scale, rounded, reaches. An estimate decides, unless it is too near a threshold; then all lanes divide. All
/// lanes of the warp call it.
/// @param scale  0: codes are 2^(b-1); NaN: 0
/// @param at     addresses, as floats
template <int kBits>
__device__ __forceinline__ void find_codes(const float (&x)[8], float scale, const CodebookTables<kBits>& tables,
                                           float (&at)[8]) {
  using Tables = CodebookTables<kBits>;
  constexpr float kMagic = 8388608.0f;  // 2^23: a sum with it is rounded to an integer
  const float inverse = __frcp_rn(scale), to_place = inverse * tables.to_place;
  const float margin = scale > 0.0f ? tables.margin : -kMinusInf;
  const float first_bin = fmaf(-kMagic, kEight, __uint_as_float(ptx::shared_address(tables.bins)));
  float nearest = -kMinusInf;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float place = fmaf(__saturatef(fmaf(x[e], to_place, 0.5f)), Tables::kBins - 1, kMagic);
    unsigned threshold, below;
    ptx::ld_shared_pair(__float_as_uint(fmaf(place, kEight, first_bin)), threshold, below);
    const float above = fmaf(x[e], inverse, -__uint_as_float(threshold));
    nearest = fminf(nearest, fabsf(above));
    at[e] = fmaf(ptx::at_least(above, 0.0f), kEight, __uint_as_float(below));
  }
  if (!__any_sync(kAll, nearest <= margin)) return;
#pragma unroll
  for (int e = 0; e < 8; ++e) at[e] = x[e];
#pragma unroll 1
  for (int e = 0; e < 8; ++e) {
    const float y = __fdiv_rn(at[0], scale);
    int code = 0;
#pragma unroll 1
    for (int i = 0; i < Tables::kThresholds; ++i) code += tables.thresholds[i] <= y;
    if (!(scale > 0.0f)) code = scale == 0.0f ? Tables::kEntries / 2 : 0;
    // A loop that is not unrolled cannot index registers, so they move up.
#pragma unroll
    for (int i = 0; i < 7; ++i) at[i] = at[i + 1];
    at[7] = __uint_as_float(ptx::shared_address(tables.entries + code));
  }
}

/// Byte `byte` of a lane's values of a step, relative to its first byte of the row, if kBits divides 8.
template <typename Side>
KVQ_HD constexpr int value_bytes_between(int step, int byte) {
  return value_byte_offset(Side::side(), 0, 4 * Side::kBits * step + byte) - value_byte_offset(Side::side(), 0, 0);
}
/// Whether that holds for all lanes and tokens.
template <typename Side>
KVQ_HD constexpr bool have_equal_distances() {
  constexpr TileSide kSide = Side::side();
  constexpr int kBits = Side::kBits;
  for (int at = 0; at < kTileTokens * 4; ++at)
    for (int step = 0; step < Side::kHeadDim / 32; ++step)
      for (int i = 0; i < kBits; ++i)
        if (value_byte_offset(kSide, at / 4, kBits * (4 * step + at % 4) + i) !=
            value_byte_offset(kSide, at / 4, kBits * (at % 4)) + value_bytes_between<Side>(step, i))
          return false;
  return true;
}

/// Stores a lane's codes of a step, the channels 32 j + 8 t + e, in the tile.
/// @param bits   CodebookTables::Entry::bits of each
/// @param token  of the tile
template <typename Side>
__device__ __forceinline__ void lay_out(const unsigned (&bits)[8], std::byte* tile, int token, bool value, int j,
                                        int t) {
  constexpr TileSide kSide = Side::side();
  constexpr int kBits = Side::kBits;
  /// The sum of codes times powers of two.
  const auto sum = [&](int first, int count, unsigned base) {
    unsigned result = bits[first + count - 1];
#pragma unroll
    for (int e = count - 2; e >= 0; --e) result = result * base + bits[first + e];
    return result;
  };
  const auto byte_of = [](unsigned word, int byte) { return static_cast<std::byte>(word >> (8 * byte) & 0xFFu); };
  if (!value) {
    const unsigned planes = sum(0, 8, 2);
#pragma unroll
    for (int bit = 0; bit < kBits; ++bit)
      tile[key_word_offset(kSide, token, j * kBits + bit) + t] = byte_of(planes, bit);
    return;
  }
  if constexpr (kBits == 3) {
    const auto put = [&](int byte, std::byte of) { tile[value_byte_offset(kSide, token, 4 * kBits * j + byte)] = of; };
#pragma unroll
    for (int half = 0; half < 2; ++half) put(2 * t + half, byte_of(sum(4 * half, 4, 4), 0));
    put(8 + t, byte_of(sum(0, 8, 2), 2));
  } else {
    static_assert(have_equal_distances<Side>());
    const unsigned word = sum(0, 8, 1u << kBits);
    std::byte* first = tile + value_byte_offset(kSide, token, kBits * t);
#pragma unroll
    for (int i = 0; i < kBits; ++i) first[value_bytes_between<Side>(j, i)] = byte_of(word, i);
  }
}

/// Makes the codes of a token's row and stores them in the tile. All lanes of the warp call it.
/// @param scale  see find_codes()
/// @param token  of the tile
/// @return  the sum of squares of the codes' entries
template <typename Side>
__device__ __forceinline__ float encode_codebook(const float (&x)[Side::kHeadDim / 32][8], float scale,
                                                 const CodebookTables<Side::kBits>& tables,
                                                 CodebookScratch<Side>& scratch, int token, bool value, int lane) {
  return tree_sum_of_steps<Side>(0, [&](int j, float(&y)[8]) {
    float at[8];
    find_codes<Side::kBits>(x[j], scale, tables, at);
    unsigned bits[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      unsigned square;
      ptx::ld_shared_pair(__float_as_uint(at[e]), square, bits[e]);
      y[e] = __uint_as_float(square);
    }
    lay_out<Side>(bits, scratch.tile, token, value, j, lane & 3);
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
    const float squares = encode_codebook<Side>(rows.x[0], of_row, tables, scratch, lane / 4 + 8 * r, value, lane);
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
