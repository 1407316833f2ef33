#pragma once

#include <kvq/artifact/artifact.h>

#include <cstdint>
#include <span>
#include <vector>

namespace kvq::test {

/// What a runtime can serve: head_dim 128, 16 query and 4 KV heads, golden rows in every layer.
/// 0: affine 2 bits, block Hadamards, one with signs of each head, centres. 1: symmetric 2 bits, Hadamard of order 64.
/// 2: affine, 4 bits for keys and 2 for values, keys not rotated, one rotation for all heads of values. 3: exact. 4:
/// dense rotations, one for each head of keys, one for all of values; values centred, both clipped. 5: as 0 with other
/// numbers and a sliding window.
Artifact served_artifact(Windows windows = {}, std::int64_t golden_tokens = 50);

/// The same model with transforms, and rows and queries as these meet them: neither's energy is far from even once they
/// are transformed. 0: affine 2 bits, scales of channels before Hadamard blocks with signs and centres, of keys the
/// same for both channels of a rotary pair. 1: symmetric 2 bits, dense transforms of conditions of 4 and 3, one for
/// each head of keys, one for all of values, which are centred. 2: affine, 4 bits for keys and 2 for values, scales
/// alone for keys, equal in all heads and in pairs; a dense transform of values. 3: as 0 without signs and centres,
/// scales of one side alone: values. 4: dense transforms near the bound of the condition, affine 2 bits.
Artifact transformed_artifact(Windows windows = {}, std::int64_t golden_tokens = 50);
/// Rows [heads, D] of keys or values that the plan transforms to `wanted`, in bfloat16.
std::vector<std::uint16_t> rows_for(const TensorPlan& plan, std::span<const float> wanted, int first_head = 0);
/// Queries [Hq, D] that a keys' plan transforms to `wanted`, in bfloat16.
std::vector<std::uint16_t> queries_for(const TensorPlan& plan, int num_kv_heads, std::span<const float> wanted);

}  // namespace kvq::test
