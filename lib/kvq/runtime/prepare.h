#pragma once

#include <kvq/core/status.h>
#include <kvq/plan/layer_plan.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// What the write kernels want of a plan, made on the host; the caller copies it to the device.
namespace kvq {

/// Rank of the magnitude that a row is clipped to, 1 being the largest (packing.md, "Clip"); 0: no clip.
/// @param clip_ratio  rho
int clip_rank(double clip_ratio, int head_dim);

/// The ranks of all heads. @return  [num_kv_heads], or empty if the plan clips nothing
std::vector<std::int32_t> clip_ranks(const TensorPlan& plan, int num_kv_heads, int head_dim);

/// The centre as the rows are rotated: center @ R, in double, rounded once.
/// @return  [num_kv_heads, D], or empty if the plan has none
std::vector<float> rotated_center(const TensorPlan& plan, int num_kv_heads, int head_dim);

/// Bytes of one packed matrix.
std::int64_t packed_rotation_bytes(int head_dim);

/// Packs dense rotations for the write kernel (WriteSide::rotation).
/// @param matrices  [n, D, D] row-major, x_rot = x @ R
/// @param bf16      the type of the rows that will be multiplied, else fp16
/// @param out       n times packed_rotation_bytes()
Status pack_rotations(std::span<const float> matrices, int head_dim, bool bf16, std::span<std::byte> out);

/// Lays dense rotations out for decode (DeviceRotation::fragments).
/// @param matrices  [n, D, D] as in DeviceRotation::matrix; D a multiple of 32
/// @return          n times 4 D D bytes; empty for other D
std::vector<std::byte> rotation_fragments(std::span<const float> matrices, int head_dim);

}  // namespace kvq
