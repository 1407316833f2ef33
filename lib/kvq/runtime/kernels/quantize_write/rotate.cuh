#pragma once

#include <kvq/runtime/kernels/quantize_write/params.h>
#include <kvq/runtime/kernels/common/quantize/rows.cuh>

/// Loads rows, rotates them and subtracts the center. A Hadamard transform has one step for each bit of the channel's
/// index, which is 32 j + 8 t + e. Bits 0 and 2 (of e), 3 and 4 (t) are one product of tensor cores with a matrix of
/// +1, -1 (and 0 between different blocks): exact products, summed in float32. The 16 rows of the product are eight
/// tokens' channels e with bit 1 clear and with bit 1 set, so that the operand is exactly the words that a lane loads.
/// Bit 5 adds two such products; bits 1 and 6 and above are additions within the lane. Order 1 is a product with the
/// identity. Signs are applied before, to the rows' own 16 bits; channel factors (scales with signs) are multiplied
/// into the matrix, so that nothing is rounded.
namespace kvq::write {

/// One element of the 16 x 16 matrix over bits 0, 2, 3, 4 of the channel; rows and columns are numbered as the
/// fragments are: i < 8: t = i / 2, e = i mod 2; else t = (i - 8) / 2, e = 4 + i mod 2.
template <typename T>
__device__ __forceinline__ unsigned matrix_element(int row, int column, int order) {
  const auto channel = [](int i) { return (i % 8 / 2) * 8 + (i / 8) * 4 + i % 2; };
  const int a = channel(row), b = channel(column), inside = order - 1;
  if ((a ^ b) & ~inside) return 0;  // different blocks
  return Pair<T>::kOne | (__popc(a & b & inside) & 1 ? 0x8000u : 0u);
}

/// The lane's fragment of the matrix, as the product's operand: x and y for the first half of the columns, z and w for
/// the second.
template <typename T>
__device__ __forceinline__ uint4 matrix_operand(int order, int lane) {
  unsigned b[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 8 * half + 2 * (lane & 3), column = 8 * n + (lane >> 2);
      b[n][half] = matrix_element<T>(row, column, order) | matrix_element<T>(row + 1, column, order) << 16;
    }
  return make_uint4(b[0][0], b[0][1], b[1][0], b[1][1]);
}

/// x_rot minus the rotated center. @param t  lane mod 4
template <typename Side>
__device__ __forceinline__ void subtract_center(Rows<Side>& rows, const float* center, int t) {
#pragma unroll
  for (int j = 0; j < Rows<Side>::kSteps; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 c = __ldg(reinterpret_cast<const float4*>(center + 32 * j + 8 * t + 4 * half));
      const float centers[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = rows.x[r][j][4 * half + i];
          x = fmaf(x, rows.row_scale, -centers[i]);
        }
    }
  rows.row_scale = 1.0f;
}

/// Address of the lane's first channel of a token's row.
template <typename Side, typename T>
__device__ __forceinline__ const uint4* row_of(const WriteSide& side, int token, int head, int lane) {
  const std::uint64_t first = ptx::mul_wide(static_cast<unsigned>(token), static_cast<unsigned>(side.token_stride));
  return reinterpret_cast<const uint4*>(static_cast<const T*>(side.x) + first + head * Side::kHeadDim) + (lane & 3);
}

/// Loads the warp's rows: the lane's eight of each 32 channels, of the tokens g and g + 8.
template <typename Side, typename T>
__device__ __forceinline__ void load_rows(const WriteSide& side, const WriteParams& p, int first_token, int head,
                                          int lane, uint4 (&raw)[2][Side::kHeadDim / 32]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int token = min(first_token + (lane >> 2) + 8 * r, p.num_tokens - 1);
    const uint4* row = row_of<Side, T>(side, token, head, lane);
#pragma unroll
    for (int j = 0; j < Side::kHeadDim / 32; ++j) raw[r][j] = __ldcg(row + 4 * j);
  }
}

/// Prefetches the rows of a later load_rows() into L2, 128 bytes a lane and step.
template <typename Side, typename T>
__device__ __forceinline__ void prefetch_rows(const WriteSide& side, const WriteParams& p, int first_token, int head,
                                              int lane) {
  constexpr int kLines = (Side::kHeadDim * 2 + 127) / 128;  // of a row
#pragma unroll
  for (int i = lane; i < kTileTokens * kLines; i += 32) {
    const int token = first_token + i / kLines;
    if (token < p.num_tokens)
      ptx::prefetch_l2(static_cast<const T*>(side.x) + token * side.token_stride + head * Side::kHeadDim +
                       i % kLines * 64);
  }
}

/// Starts asynchronous copies of the words that load_rows() would load to shared memory. A lane copies exactly the
/// words that it will read.
/// @tparam kRanges  number of ranges that the channels are divided into
/// @param to     [2, D / 32 / kRanges, 32], of the warp
/// @param range  which of the ranges
template <typename Side, typename T, int kRanges = 1>
__device__ __forceinline__ void fetch_rows(const WriteSide& side, const WriteParams& p, int first_token, int head,
                                           int lane, uint4* to, int range = 0) {
  constexpr int kRangeSteps = Side::kHeadDim / 32 / kRanges;
  const unsigned own = ptx::shared_address(to + lane);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int token = min(first_token + (lane >> 2) + 8 * r, p.num_tokens - 1);
    const uint4* row = row_of<Side, T>(side, token, head, lane) + 4 * range * kRangeSteps;
#pragma unroll
    for (int j = 0; j < kRangeSteps; ++j) ptx::cp_async_16(own + (r * kRangeSteps + j) * 512, row + 4 * j);
  }
  ptx::cp_async_commit_group();
}

/// The matrix times the channel factors of a head, the second operand of the product if channels have factors. A factor
/// times +1 or -1 is a 16-bit number, so nothing is rounded. Factors depend on bit 1 of the channel, too, so here the
/// 16 rows of an operand are the tokens g and g + 8, and there is one product for each value of bit 1.
/// @tparam kDim  channels
template <int kDim>
struct ScaledMatrix {
  static constexpr int kSteps = kDim / 32, kTogether = kSteps % 2 == 0 ? 2 : 1;
  static constexpr int kOperands = kSteps / kTogether * 4;  ///< for steps j (and j + 1), bit 1, and the columns' half

  /// @param factors  of the head, from the lane's channels on
  /// @param b        the lane's fragment of the matrix, see matrix_operand()
  /// @return         of step j the words x and y, of step j + 1 z and w
  template <typename T>
  static __device__ __forceinline__ uint4 operand(const std::uint16_t* factors, uint4 b, int index) {
    const int j = index / 4 * kTogether, bit_1 = index / 2 % 2, n = index % 2;
    const unsigned b0 = n ? b.z : b.x, b1 = n ? b.w : b.y;
    const unsigned* f = reinterpret_cast<const unsigned*>(factors) + 16 * j + bit_1;
    const unsigned* next = f + (kTogether == 2 ? 16 : 0);
    return make_uint4(Pair<T>::multiply(b0, __ldg(f)), Pair<T>::multiply(b1, __ldg(f + 2)),
                      Pair<T>::multiply(b0, __ldg(next)), Pair<T>::multiply(b1, __ldg(next + 2)));
  }
};

/// Rows times a ScaledMatrix.
/// @tparam kBit5   whether blocks reach across two steps
/// @param operand  the lane's ScaledMatrix::operand() of an index
template <typename Side, typename T, bool kBit5, typename Operand>
__device__ __forceinline__ void scaled_products(const uint4 (&raw)[2][Side::kHeadDim / 32], Operand operand,
                                                Rows<Side>& rows) {
  using Matrix = ScaledMatrix<Side::kHeadDim>;
  constexpr int kTogether = Matrix::kTogether, kNext = kTogether - 1;
  constexpr unsigned kFlip = kBit5 ? 0x80008000u : 0u;
#pragma unroll
  for (int index = 0; index < Matrix::kOperands; ++index) {
    const int j = index / 4 * kTogether, bit_1 = index / 2 % 2, n = index % 2;
    const uint4 m = operand(index);
    const auto add = [&](float(&c)[4], int step, unsigned m0, unsigned m1) {
      const uint4 &low = raw[0][step], &high = raw[1][step];
      Pair<T>::mma(c, bit_1 ? low.y : low.x, bit_1 ? high.y : high.x, bit_1 ? low.w : low.z, bit_1 ? high.w : high.z,
                   m0, m1);
    };
    float c[kTogether][4] = {};
    add(c[0], j, m.x, m.y);
    if constexpr (kTogether == 2) {
      if constexpr (kBit5) {
        add(c[0], j + kNext, m.z, m.w);
        add(c[kNext], j, m.x, m.y);
      }
      add(c[kNext], j + kNext, m.z ^ kFlip, m.w ^ kFlip);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        rows.x[0][j + i][4 * n + 2 * bit_1 + e] = c[i][e];
        rows.x[1][j + i][4 * n + 2 * bit_1 + e] = c[i][2 + e];
      }
  }
}

/// The bits of the channel that products do not transform: (a, b) -> (a + b, a - b), in place. The common factor goes
/// into rows.row_scale.
template <typename Side>
__device__ __forceinline__ void add_within_lanes(Rows<Side>& rows, int order) {
  constexpr int kSteps = Rows<Side>::kSteps;
  const auto butterfly = [](float& a, float& b) {
    a += b;
    b = fmaf(-2.0f, b, a);
  };
  if (order >= 4) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (!(e & 2)) butterfly(rows.x[r][j][e], rows.x[r][j][e + 2]);
  }
#pragma unroll
  for (int bit = 2; bit < kSteps; bit *= 2) {
    if (order < 64 * bit || kSteps % (2 * bit) != 0) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (!(j & bit)) butterfly(rows.x[r][j][e], rows.x[r][j + bit][e]);
  }
}

/// Transforms the warp's rows.
/// @tparam kScaled  whether channels have factors; a template parameter, because code that is not run would still take
/// room
/// @param raw     as load_rows() returns them
/// @param matrix  matrix_operand() of the side's order
/// @param scaled  the lane's ScaledMatrix::operand() of an index, for kScaled
template <typename Side, typename T, bool kScaled, typename Scaled>
__device__ __forceinline__ void rotate_rows(const WriteSide& side, uint4 (&raw)[2][Side::kHeadDim / 32], uint4 matrix,
                                            Scaled scaled, int head, int lane, Rows<Side>& rows) {
  constexpr int kSteps = Rows<Side>::kSteps, kDim = Side::kHeadDim;
  const int t = lane & 3, order = side.order;
  if constexpr (Side::kExact) {
    if (order <= 1 && !side.signs && !side.center) {  // copied, because a product would turn -0 into +0
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          const unsigned words[4] = {raw[r][j].x, raw[r][j].y, raw[r][j].z, raw[r][j].w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 two = Pair<T>::to_float(words[i]);
            rows.x[r][j][2 * i] = two.x, rows.x[r][j][2 * i + 1] = two.y;
          }
        }
      return;
    }
  }
  if (!kScaled && side.signs) {
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
  // If the order does not reach bit 5, the matrices between two steps are zero.
  const unsigned b[2][2] = {{matrix.x, matrix.y}, {matrix.z, matrix.w}};
  unsigned across[2][2], second[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      across[n][half] = b[n][half] & (order >= 64 ? ~0u : 0u);
      second[n][half] = b[n][half] ^ (order >= 64 ? 0x80008000u : 0u);
    }
  if constexpr (kScaled) {
    if (order >= 64)
      scaled_products<Side, T, true>(raw, scaled, rows);
    else
      scaled_products<Side, T, false>(raw, scaled, rows);
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint4 own = raw[r][j], other = raw[r][kSteps % 2 == 0 ? j ^ 1 : j];
          const auto& with = kSteps % 2 == 0 && j % 2 == 1 ? second : b;
          float c[4] = {};
          Pair<T>::mma(c, own.x, own.y, own.z, own.w, with[n][0], with[n][1]);
          if (kSteps % 2 == 0) Pair<T>::mma(c, other.x, other.y, other.z, other.w, across[n][0], across[n][1]);
#pragma unroll
          for (int i = 0; i < 2; ++i) rows.x[r][j][4 * n + i] = c[i], rows.x[r][j][4 * n + 2 + i] = c[2 + i];
        }
  }
  add_within_lanes(rows, order);
  rows.row_scale = order > 1 ? ptx::rsqrt_approx(static_cast<float>(order)) : 1.0f;
  if constexpr (kScaled) rows.row_scale *= __ldg(side.row_scales + head);
  rows.rotated = order > 1;
  if (side.center) subtract_center<Side>(rows, side.center + head * kDim, t);
}

}  // namespace kvq::write
