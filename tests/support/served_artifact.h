#pragma once

#include <kvq/artifact/artifact.h>

#include <cstdint>
#include <span>
#include <vector>

namespace kvq::test {

/// An artifact whose layers the runtime supports: head_dim 128, 16 query and 4 KV heads, golden rows in every layer.
/// Layer 0: affine 2 bits, block Hadamards, one of them with signs of each head, centers.
/// Layer 1: symmetric 2 bits, Hadamard of order 64.
/// Layer 2: affine, 4 bits for keys and 2 for values; keys are not rotated, all heads of values share a rotation.
/// Layer 3: exact.
/// Layer 4: dense rotations, one for each head of keys and one for all values; values are centered, both sides clipped.
/// Layer 5: as layer 0 with other numbers and a sliding window.
Artifact served_artifact(Windows windows = {}, std::int64_t golden_tokens = 50);

/// The same model with transforms. Rows and queries are chosen so that their energy is nearly even after the transform.
/// Layer 0: affine 2 bits, channel scales before Hadamard blocks with signs and centers; both channels of a rotary pair
/// of keys have the same scale.
/// Layer 1: symmetric 2 bits, dense transforms with conditions 4 and 3: one for each head of keys, one for all values;
/// values are centered.
/// Layer 2: affine, 4 bits for keys and 2 for values; keys have only channel scales, equal in all heads and in rotary
/// pairs; values have a dense transform.
/// Layer 3: as layer 0 without signs and centers; only values have channel scales.
/// Layer 4: dense transforms near the largest allowed condition, affine 2 bits.
Artifact transformed_artifact(Windows windows = {}, std::int64_t golden_tokens = 50);
/// Rows [heads, D] of keys or values, in bfloat16, that the plan transforms to `wanted`.
std::vector<std::uint16_t> rows_for(const TensorPlan& plan, std::span<const float> wanted, int first_head = 0);
/// Queries [Hq, D], in bfloat16, that the plan of the keys transforms to `wanted`.
std::vector<std::uint16_t> queries_for(const TensorPlan& plan, int num_kv_heads, std::span<const float> wanted);

}  // namespace kvq::test
