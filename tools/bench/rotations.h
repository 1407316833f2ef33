#pragma once

#include "bench/cases.h"
#include "bench/device.h"

#include <kvq/plan/layer_plan.h>
#include <kvq/runtime/kernels/common/row_code.h>

#include <random>
#include <vector>

namespace kvq::bench {

/// Rotations of one side, one for each KV head, in the forms that the codec and the kernels take.
struct HeadRotations {
  std::vector<TensorPlan> plans;        ///< [Hkv], each of a single head
  std::vector<float> matrices;          ///< [Hkv, D, D], x_rot = x @ A; empty if not dense
  std::vector<float> queries, results;  ///< A^-T of each head for queries, A^-1 of each head for results
  std::vector<std::int8_t> signs;       ///< [Hkv, D] for Hadamard, else empty
  std::vector<float> factors;           ///< [Hkv, D] instead of signs: sign / channel_scale
  int order = 0;                        ///< of the Hadamard blocks; 0: no Hadamard
  int head_dim = 0;
};
HeadRotations random_rotations(CaseRotation kind, int num_kv_heads, int head_dim, std::mt19937& random);

/// Uploads the rotations in the form that kernels that read a cache take.
DeviceRotation key_rotation(Memory& memory, const HeadRotations& rotations);
DeviceRotation value_rotation(Memory& memory, const HeadRotations& rotations);
/// Likewise for a side in bit tiles (bit_plan()), with what tuned kernels multiply its rows by.
DeviceRotation bits_rotation(Memory& memory, const HeadRotations& rotations, const CacheShape& shape, Side side);
/// What kernels know of the rows of such a side.
RowCode bits_code(Memory& memory, const CacheShape& shape, Side side);
/// What kernels that read a cache know of the rows of a side with centroids (centroids_of()).
RowCode centroid_code(Memory& memory, const HeadRotations& rotations, const TileSide& tiles, Side side);

}  // namespace kvq::bench
