#pragma once

#include <kvq/runtime/kernels/quantize_write/params.h>

#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/decode/traits.cuh>
#include <type_traits>

/// Rotates rows, quantises them exactly as packing.md says and writes them into pages (formats/pages.md), in one pass:
/// a row is read once, and only its codes and numbers are written.
///
/// One warp takes 16 tokens of one head and side. Lane 4 g + t holds, of the tokens g and g + 8, the channels 32 j + 8
/// t + e, e = 0..7: what it loads as 16 bytes each, and what its pieces of the page's rows are made of. A Hadamard
/// transform works on the bits of the channel's number. Bits 0, 1 (of e) and 3, 4 (t) are one product of tensor cores
/// with a matrix of +1, -1 (and 0, where the block does not reach): exact products, summed in float32. Bits 2 and 5 and
/// above are additions within the lane.
namespace kvq::write {

constexpr unsigned kAll = ~0u;
constexpr int kWarps = 4;

template <typename Side>
struct Rows {
  static constexpr int kSteps = Side::kHeadDim / 32;
  float x[2][kSteps][8];  ///< tokens g and g + 8
};

template <typename T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  static constexpr unsigned kOne = 0x3F80;
  static __device__ __forceinline__ float2 to_float(unsigned bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u));
  }
  static __device__ __forceinline__ void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                             unsigned b0, unsigned b1) {
    ptx::mma_m16n8k16_bf16(c, a0, a1, a2, a3, b0, b1);
  }
};
template <>
struct Pair<__half> {
  static constexpr unsigned kOne = 0x3C00;
  static __device__ __forceinline__ float2 to_float(unsigned bits) {
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  }
  static __device__ __forceinline__ void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                             unsigned b0, unsigned b1) {
    ptx::mma_m16n8k16_fp16(c, a0, a1, a2, a3, b0, b1);
  }
};

/// One element of the 16 x 16 matrix over bits 0, 1, 3, 4 of the channel; rows and columns are numbered as the
/// fragments are: i < 8: t = i / 2, e = i mod 2; else t = (i - 8) / 2, e = 2 + i mod 2.
template <typename T>
__device__ __forceinline__ unsigned matrix_element(int row, int column, int order) {
  const auto channel = [](int i) { return (i % 8 / 2) * 8 + (i / 8) * 2 + i % 2; };
  const int a = channel(row), b = channel(column), inside = order - 1;
  if ((a ^ b) & ~inside) return 0;  // different blocks
  return Pair<T>::kOne | (__popc(a & b & inside) & 1 ? 0x8000u : 0u);
}

/// Loads the warp's rows and transforms them.
template <typename Side, typename T>
__device__ __forceinline__ void load_rotated(const WriteSide& side, const WriteParams& p, int first_token, int head,
                                             int lane, Rows<Side>& rows) {
  constexpr int kSteps = Rows<Side>::kSteps, kDim = Side::kHeadDim;
  const int g = lane >> 2, t = lane & 3, order = side.order;
  uint4 raw[2][kSteps];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int token = min(first_token + g + 8 * r, p.num_tokens - 1);
    const uint4* from =
        reinterpret_cast<const uint4*>(static_cast<const T*>(side.x) + token * side.token_stride + head * kDim) + t;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) raw[r][j] = __ldg(from + 4 * j);
  }
  if (order <= 1 || side.center) {
    const float* center = side.center ? side.center + head * kDim : nullptr;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const unsigned words[4] = {raw[r][j].x, raw[r][j].y, raw[r][j].z, raw[r][j].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 two = Pair<T>::to_float(words[i]);
          const int channel = 32 * j + 8 * t + 2 * i;
          rows.x[r][j][2 * i] = center ? two.x - center[channel] : two.x;
          rows.x[r][j][2 * i + 1] = center ? two.y - center[channel + 1] : two.y;
        }
      }
    if (order <= 1) return;
    // Centred rows have more digits than the tensor cores take: shuffles and additions instead.
    const std::int8_t* signs = side.signs ? side.signs + (side.per_head ? head * kDim : 0) : nullptr;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& x = rows.x[r][j][e];
          if (signs && signs[32 * j + 8 * t + e] < 0) x = -x;
        }
#pragma unroll
    for (int bit = 0; bit < 5; ++bit) {
      if (bit == 2 || order <= 1 << bit) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          if (bit < 2) {
#pragma unroll
            for (int e = 0; e < 8; ++e)
              if (!(e >> bit & 1)) {
                const float a = rows.x[r][j][e], b = rows.x[r][j][e | 1 << bit];
                rows.x[r][j][e] = a + b, rows.x[r][j][e | 1 << bit] = a - b;
              }
          } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              const float mine = rows.x[r][j][e], other = __shfl_xor_sync(kAll, mine, 1 << (bit - 3));
              rows.x[r][j][e] = t >> (bit - 3) & 1 ? other - mine : mine + other;
            }
          }
        }
    }
  } else {
    if (side.signs) {
      const std::int8_t* signs = side.signs + (side.per_head ? head * kDim : 0) + 8 * t;
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const uint2 eight = __ldg(reinterpret_cast<const uint2*>(signs + 32 * j));
        const auto flips = [](unsigned bytes, int i) {
          return (bytes >> (16 * i + 7) & 1) << 15 | (bytes >> (16 * i + 15) & 1) << 31;
        };
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          raw[r][j].x ^= flips(eight.x, 0), raw[r][j].y ^= flips(eight.x, 1);
          raw[r][j].z ^= flips(eight.y, 0), raw[r][j].w ^= flips(eight.y, 1);
        }
      }
    }
    unsigned b[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 8 * half + 2 * t, column = 8 * n + g;
        b[n][half] = matrix_element<T>(row, column, order) | matrix_element<T>(row + 1, column, order) << 16;
      }
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          float c[4] = {};
          if (half == 0)
            Pair<T>::mma(c, raw[0][j].x, raw[1][j].x, raw[0][j].y, raw[1][j].y, b[n][0], b[n][1]);
          else
            Pair<T>::mma(c, raw[0][j].z, raw[1][j].z, raw[0][j].w, raw[1][j].w, b[n][0], b[n][1]);
          rows.x[0][j][4 * half + 2 * n] = c[0], rows.x[0][j][4 * half + 2 * n + 1] = c[1];
          rows.x[1][j][4 * half + 2 * n] = c[2], rows.x[1][j][4 * half + 2 * n + 1] = c[3];
        }
  }
  // Bit 2, then the steps' bits.
  const float scale = rsqrtf(static_cast<float>(order));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (order >= 8) {
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float a = rows.x[r][j][e], b = rows.x[r][j][e + 4];
          rows.x[r][j][e] = a + b, rows.x[r][j][e + 4] = a - b;
        }
    }
#pragma unroll
    for (int bit = 1; bit < kSteps; bit *= 2) {
      if (order < 64 * bit || kSteps % (2 * bit) != 0) continue;
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        if (j & bit) continue;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float a = rows.x[r][j][e], b = rows.x[r][j + bit][e];
          rows.x[r][j][e] = a + b, rows.x[r][j + bit][e] = a - b;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
#pragma unroll
      for (int e = 0; e < 8; ++e) rows.x[r][j][e] *= scale;
  }
}

/// R of packing.md: the number as stored, and its bits.
template <typename Side>
__device__ __forceinline__ float stored(float x, unsigned short& bits) {
  if constexpr (Side::kBfloat) {
    __nv_bfloat16 y = __float2bfloat16_rn(x);
    if (__hisinf(y)) y = __ushort_as_bfloat16(static_cast<unsigned short>(0x7F7Fu | (x < 0.0f ? 0x8000u : 0u)));
    bits = __bfloat16_as_ushort(y);
    return __bfloat162float(y);
  } else {
    const __half y = __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f));
    bits = __half_as_ushort(y);
    return __half2float(y);
  }
}

/// x / s rounded correctly, given r = 1 / s rounded correctly (Markstein): quotients in question are far from overflow,
/// and where they are so small that the remainder is lost they round to code 0 in any case.
__device__ __forceinline__ float divide(float x, float s, float r) {
  const float q = x * r;
  return fmaf(fmaf(-q, s, x), r, q);
}

/// step[b] of packing.md (b).
template <int kBits>
constexpr float kGaussianStep = kBits == 2 ? 0.9956867f : 0.3352006f;

/// Sum of the group in the order of packing.md: neighbours first. Lane-local eight, the four lanes, then the steps.
template <typename Side, typename Term>
__device__ __forceinline__ float tree_sum(int group, Term term) {
  constexpr int kEach = Side::kStepsInGroup;
  float steps[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    float y[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) y[e] = term(group * kEach + j, e);
    float sum = __fadd_rn(__fadd_rn(__fadd_rn(y[0], y[1]), __fadd_rn(y[2], y[3])),
                          __fadd_rn(__fadd_rn(y[4], y[5]), __fadd_rn(y[6], y[7])));
    sum = __fadd_rn(sum, __shfl_xor_sync(kAll, sum, 1));
    steps[j] = __fadd_rn(sum, __shfl_xor_sync(kAll, sum, 2));
  }
  // A group of 3 or 6 steps is padded with zeros to a power of two.
#pragma unroll
  for (int width = 1; width < kEach; width *= 2)
#pragma unroll
    for (int j = 0; j < kEach; j += 2 * width)
      if (j + width < kEach) steps[j] = __fadd_rn(steps[j], steps[j + width]);
  return steps[0];
}

/// Codes and numbers of one token's row. @param numbers  bits of scale, or scale and minimum, of each group
template <typename Side>
__device__ __forceinline__ void encode(const float (&x)[Side::kHeadDim / 32][8], ScaleRule rule,
                                       unsigned (&words)[Side::kWords], unsigned (&numbers)[Side::kGroups]) {
  constexpr int kEach = Side::kStepsInGroup, kLevels = (1 << Side::kBits) - 1;
  constexpr float kMost = 3.40282347e38f;
#pragma unroll
  for (unsigned& w : words) w = 0;
#pragma unroll
  for (int group = 0; group < Side::kGroups; ++group) {
    float step = 0.0f, minimum = 0.0f;
    unsigned short scale_bits = 0, minimum_bits = 0;
    float energy = 0.0f;
    if constexpr (Side::kAffine) {
      float low = x[group * kEach][0], high = low;
#pragma unroll
      for (int j = group * kEach; j < (group + 1) * kEach; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e) low = fminf(low, x[j][e]), high = fmaxf(high, x[j][e]);
      low = fminf(low, __shfl_xor_sync(kAll, low, 1)), high = fmaxf(high, __shfl_xor_sync(kAll, high, 1));
      low = fminf(low, __shfl_xor_sync(kAll, low, 2)), high = fmaxf(high, __shfl_xor_sync(kAll, high, 2));
      step = stored<Side>(__fdiv_rn(fminf(__fsub_rn(high, low), kMost), static_cast<float>(kLevels)), scale_bits);
      minimum = stored<Side>(low, minimum_bits);
      if (minimum == 0.0f) minimum_bits = 0;
    } else {
      if (rule == ScaleRule::absmax) {
        float most = 0.0f;
#pragma unroll
        for (int j = group * kEach; j < (group + 1) * kEach; ++j)
#pragma unroll
          for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(x[j][e]));
        most = fmaxf(most, __shfl_xor_sync(kAll, most, 1));
        most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
        step = stored<Side>(__fdiv_rn(__fmul_rn(2.0f, most), static_cast<float>(kLevels)), scale_bits);
      } else {
        energy = tree_sum<Side>(group, [&](int j, int e) { return __fmul_rn(x[j][e], x[j][e]); });
        step = stored<Side>(
            __fmul_rn(kGaussianStep<Side::kBits>, __fsqrt_rn(__fdiv_rn(energy, static_cast<float>(Side::kGroup)))),
            scale_bits);
      }
    }
    // Codes are rounded down in the low bits of a float, after the clamp, which commutes with rounding down. A group
    // whose step is 0 has quotients 0, or for affine codes 0.5.
    const float reciprocal = step > 0.0f ? __frcp_rn(step) : 0.0f;
    constexpr float kHalf = static_cast<float>(1 << (Side::kBits - 1)), kMagic = 12582912.0f;
    float squares = 0.0f, levels[kEach][8];
#pragma unroll
    for (int j = 0; j < kEach; ++j)
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        unsigned bits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = x[group * kEach + j][4 * w + i];
          float code;
          if constexpr (Side::kAffine) {
            const float quotient = __fadd_rn(divide(__fsub_rn(value, minimum), step, reciprocal), 0.5f);
            code = __fadd_rd(fminf(fmaxf(quotient, 0.0f), static_cast<float>(kLevels)), kMagic);
          } else {
            const float quotient = divide(value, step, reciprocal);
            code = __fadd_rd(fminf(fmaxf(quotient, -kHalf), kHalf - 1.0f), kMagic + kHalf);
            const float level = fmaf(2.0f, code - kMagic, -static_cast<float>(kLevels));
            squares = fmaf(level, level, squares);
            levels[j][4 * w + i] = level;
          }
          bits[i] = __float_as_uint(code);
        }
        const CodePlace place = code_place(Side::side(), 32 * (group * kEach + j) + 4 * w);
        const unsigned four =
            __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
        words[place.byte / 4] |= four << (place.slice * Side::kBits);
      }
    if constexpr (!Side::kAffine) {
      squares += __shfl_xor_sync(kAll, squares, 1);
      squares += __shfl_xor_sync(kAll, squares, 2);
      const float n = squares;
      if (step > 0.0f && rule == ScaleRule::norm) {
        stored<Side>(__fsqrt_rn(__fdiv_rn(__fmul_rn(4.0f, energy), n)), scale_bits);
      } else if (rule == ScaleRule::least_squares) {
        const float dot = tree_sum<Side>(group, [&](int j, int e) { return __fmul_rn(x[j][e], levels[j % kEach][e]); });
        if (step > 0.0f) stored<Side>(__fdiv_rn(__fmul_rn(2.0f, dot), n), scale_bits);
      }
      if (step == 0.0f) scale_bits = 0;
    }
    numbers[group] = scale_bits | static_cast<unsigned>(minimum_bits) << 16;
  }
}

/// Turns four words of bytes: result i holds byte i of each.
__device__ __forceinline__ void transpose_bytes(unsigned a, unsigned b, unsigned c, unsigned d, unsigned (&out)[4]) {
  const unsigned ab0 = __byte_perm(a, b, 0x5140), ab1 = __byte_perm(a, b, 0x7362);
  const unsigned cd0 = __byte_perm(c, d, 0x5140), cd1 = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(ab0, cd0, 0x5410), out[1] = __byte_perm(ab0, cd0, 0x7632);
  out[2] = __byte_perm(ab1, cd1, 0x5410), out[3] = __byte_perm(ab1, cd1, 0x7632);
}

/// One warp's task: 16 tokens of one head and side.
template <typename Side, typename T>
__device__ __forceinline__ void write_side(const WriteParams& p, const WriteSide& from, bool value, int first_token,
                                           int head, int head_bytes, int side_offset, int lane) {
  constexpr TileSide kSide{Side::kHeadDim, Side::kBits, Side::kGroup, Side::kNumbers};
  constexpr int kRun = 2 * Side::kWords, kChunk = chunk_bytes(kSide) / 4;
  const int g = lane >> 2, t = lane & 3;
  Rows<Side> rows;
  load_rotated<Side, T>(from, p, first_token, head, lane, rows);
  unsigned words[2][Side::kWords] = {}, numbers[2][Side::kGroups] = {};
  // Twice the same code rather than twice as much of it: a task is one pass through it, and it must come from the
  // cache.
#pragma unroll 1
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < Side::kWords; ++i) words[0][i] = words[1][i];
#pragma unroll
    for (int i = 0; i < Side::kGroups; ++i) numbers[0][i] = numbers[1][i];
    encode<Side>(rows.x[0], from.rule, words[1], numbers[1]);
#pragma unroll
    for (int j = 0; j < Rows<Side>::kSteps; ++j)
#pragma unroll
      for (int e = 0; e < 8; ++e) rows.x[0][j][e] = rows.x[1][j][e];
  }

  // Where the two tokens go. If all 16 make one tile, a lane stores its run in whole chunks.
  std::int64_t slot[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    slot[r] = first_token + g + 8 * r < p.num_tokens ? p.slot_mapping[first_token + g + 8 * r] : -1;
  const std::int64_t tile_slot = __shfl_sync(kAll, slot[0], 0);
  const bool whole = __all_sync(
      kAll, tile_slot >= 0 && tile_slot % kTileTokens == 0 && slot[0] == tile_slot + g && slot[1] == tile_slot + g + 8);
  const std::int64_t page_mask = (std::int64_t{1} << p.page_shift) - 1;
  const auto tile_of = [&](std::int64_t at) {
    return p.pages + (at >> p.page_shift) * p.page_stride + head * head_bytes + side_offset +
           static_cast<int>(at & page_mask) / kTileTokens * kSide.bytes();
  };
  if (whole && (!value || Side::kWords % 2 == 0)) {
    std::byte* tile = tile_of(tile_slot);
    unsigned run[kRun];
    int reader = lane;
    if (value) {
      // Lanes of even and odd g exchange halves, then each has one half of four tokens: those of lane 4 (2 t + half) +
      // g / 2.
      const bool odd = g & 1;
      reader = (2 * t + odd) * 4 + g / 2;
#pragma unroll
      for (int pair = 0; pair < Side::kWords / 2; ++pair) {
        unsigned mine[2], theirs[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          mine[r] = odd ? words[r][2 * pair + 1] : words[r][2 * pair];
          theirs[r] = __shfl_xor_sync(kAll, odd ? words[r][2 * pair] : words[r][2 * pair + 1], 4);
        }
        unsigned out[4];
        transpose_bytes(odd ? theirs[0] : mine[0], odd ? theirs[1] : mine[1], odd ? mine[0] : theirs[0],
                        odd ? mine[1] : theirs[1], out);
#pragma unroll
        for (int i = 0; i < 4; ++i) run[4 * pair + i] = out[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < Side::kWords; ++i) run[i] = words[0][i], run[Side::kWords + i] = words[1][i];
    }
#pragma unroll
    for (int c = 0; c < kRun / kChunk; ++c) {
      std::byte* to = tile + (c * 32 + reader) * (kChunk * 4);
      if constexpr (kChunk == 4)
        *reinterpret_cast<uint4*>(to) = make_uint4(run[4 * c], run[4 * c + 1], run[4 * c + 2], run[4 * c + 3]);
      else
        *reinterpret_cast<uint2*>(to) = make_uint2(run[2 * c], run[2 * c + 1]);
    }
#pragma unroll
    for (int group = 0; group < Side::kGroups; ++group) {
      if (t != group % 4) continue;
      std::byte* to = tile + number_offset(kSide, g, group, 0);
      if constexpr (Side::kAffine)
        *reinterpret_cast<uint2*>(to) = make_uint2(numbers[0][group], numbers[1][group]);
      else
        *reinterpret_cast<unsigned*>(to) = numbers[0][group] | numbers[1][group] << 16;
    }
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (slot[r] < 0) continue;
      std::byte* tile = tile_of(slot[r]);
      const int token = static_cast<int>(slot[r]) & (kTileTokens - 1);
#pragma unroll
      for (int byte = 0; byte < kSide.piece_bytes(); ++byte) {
        const unsigned bits = words[r][byte / 4] >> (8 * (byte % 4));
        tile[value ? value_code_offset(kSide, token, t, byte) : key_code_offset(kSide, token, t, byte)] =
            static_cast<std::byte>(bits & 255);
      }
#pragma unroll
      for (int group = 0; group < Side::kGroups; ++group) {
        if (t != group % 4) continue;
        auto* to = reinterpret_cast<unsigned short*>(tile + number_offset(kSide, token, group, 0));
        to[0] = static_cast<unsigned short>(numbers[r][group]);
        if constexpr (Side::kAffine) to[1] = static_cast<unsigned short>(numbers[r][group] >> 16);
      }
    }
  }
}

/// Grid [ceil(T / 16 / kWarps), 2 Hkv]: keys of all heads, then values.
template <typename K, typename V, typename T>
__global__ void __launch_bounds__(32 * kWarps, K::kHeadDim > 128         ? 2
                                               : K::kBits + V::kBits > 4 ? 4
                                                                         : 5)
    quantize_write_kernel(const __grid_constant__ WriteParams p) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int first_token = (static_cast<int>(blockIdx.x) * kWarps + warp) * kTileTokens;
  if (first_token >= p.num_tokens) return;
  const int tiles = 1 << (p.page_shift - 4), head_bytes = tiles * (K::side().bytes() + V::side().bytes());
  const bool value = static_cast<int>(blockIdx.y) >= p.num_kv_heads;
  const int head = static_cast<int>(blockIdx.y) - (value ? p.num_kv_heads : 0);
  const int side_offset = value ? tiles * K::side().bytes() : 0;
  if constexpr (std::is_same_v<K, V>) {  // one piece of code for both, so that it stays in the cache
    const WriteSide from = value ? p.v : p.k;
    write_side<K, T>(p, from, value, first_token, head, head_bytes, side_offset, lane);
  } else {
    if (value)
      write_side<V, T>(p, p.v, true, first_token, head, head_bytes, side_offset, lane);
    else
      write_side<K, T>(p, p.k, false, first_token, head, head_bytes, side_offset, lane);
  }
}

}  // namespace kvq::write
