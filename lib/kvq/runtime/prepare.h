#pragma once

#include <kvq/core/status.h>
#include <kvq/plan/layer_plan.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// Arrays of a plan in the layouts that kernels read, made on the host; the caller copies them to the device.
namespace kvq {

/// Rank of the magnitude that a row is clipped to, 1 being the largest (packing.md, "Clip"); 0: no clip.
/// @param clip_ratio  rho
int clip_rank(double clip_ratio, int head_dim);

/// The ranks of all heads. @return  [num_kv_heads], or empty if the plan clips nothing
std::vector<std::int32_t> clip_ranks(const TensorPlan& plan, int num_kv_heads, int head_dim);

/// The rotated center: center @ A, in double, rounded once.
/// @return  [num_kv_heads, D], or empty if the plan has none
std::vector<float> rotated_center(const TensorPlan& plan, int num_kv_heads, int head_dim);

/// Bytes of one packed matrix.
std::int64_t packed_rotation_bytes(int head_dim);

/// Packs dense rotations for the write kernel (WriteSide::rotation).
/// @param matrices    [n, D, D] row-major, x_rot = x @ A
/// @param bf16        the type of the rows that will be multiplied, else fp16
/// @param out         n times packed_rotation_bytes()
/// @param row_scales  [n] powers of two that the elements are divided by first, or empty: 1. For fp16, pass
///                    fp16_row_scales() unless A is orthogonal
Status pack_rotations(std::span<const float> matrices, int head_dim, bool bf16, std::span<std::byte> out,
                      std::span<const float> row_scales = {});

/// A power of two for each matrix such that the largest element divided by it lies in [2^13, 2^14). The error of the
/// two fp16 split halves is then below 2^-21 of an element, or 2^-38 of the largest element. @param matrices  [n, D, D]
std::vector<float> fp16_row_scales(std::span<const float> matrices, int head_dim);

/// Channel factors before the Hadamard blocks (WriteSide::factors), sign * channel_scale / row scale. The products are
/// exact and summed in float32. In fp16 a factor below 2^-14 has an error of up to 2^-25, so row scales are chosen such
/// that factors are about 1.
struct WriteFactors {
  std::vector<std::uint16_t> factors = {};  ///< [H, D] in the rows' type
  std::vector<float> row_scales = {};       ///< [H] the power of two nearest to the geometric mean of channel_scale
};
/// @param rotation  empty results without a channel_scale
/// @param bf16      the type of the rows, else fp16
/// @throws          Error{unsupported} for scales that fp16 cannot represent
WriteFactors write_factors(const Rotation& rotation, int head_dim, bool bf16);

/// DeviceRotation::factors of a rotation with a channel_scale: sign / channel_scale. @return  [H, D]
std::vector<float> read_factors(const Rotation& rotation);

/// DeviceRotation::sizes: for each column of each matrix the power of two above its largest magnitude.
/// @param inverses  [n, D, D]
/// @return          [n, D]
std::vector<float> column_sizes(std::span<const float> inverses, int head_dim);

/// Lays dense rotations out for decode (DeviceRotation::fragments).
/// @param matrices  [n, D, D] as in DeviceRotation::matrix; D a multiple of 32
/// @return          n times 4 D D bytes; empty for other D
std::vector<std::byte> rotation_fragments(std::span<const float> matrices, int head_dim);

/// LinearTaps on the host.
struct HostTaps {
  std::vector<float> weights = {};
  std::vector<std::uint16_t> sources = {};
  int count = 0;
};
/// Linear rows of B bits: a decoded row is its scale times Theta times its bits, each +1/2 or -1/2. For each bit of
/// keys its column of Theta, for each channel of values its row.
/// @param bases  [n, D, B] Theta; B and D are multiples of 32
HostTaps linear_taps(std::span<const float> bases, int head_dim, int row_bits, bool value);

/// What rows in bit tiles are dequantized by: Theta^T A^-1 over A^-1, laid out for the kernels. A decoded row is
/// x_rot @ A^-1.
/// @param entries    n, heads with matrices of their own
/// @param inverses   [n, D, D], or empty: x is x_rot
/// @param bases      [n, D, B] of linear rows
/// @param row_words  B / 32; 0: rows are decoded first, so only A^-1 is needed
/// @return           n times LinearRowsLayout{head_dim, row_words}.bytes(); empty if D is no multiple of 64
std::vector<std::byte> row_matrices(std::size_t entries, std::span<const float> inverses, std::span<const float> bases,
                                    int head_dim, int row_words, bool value);

}  // namespace kvq
