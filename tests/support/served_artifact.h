#pragma once

#include <kvq/artifact/artifact.h>

#include <cstdint>

namespace kvq::test {

/// What a runtime can serve: head_dim 128, 16 query and 4 KV heads, golden rows in every layer.
/// 0: affine 2 bits, block Hadamards, one with signs of each head, centres. 1: symmetric 2 bits, Hadamard of order 64.
/// 2: affine, 4 bits for keys and 2 for values, keys not rotated, one rotation for all heads of values. 3: exact. 4:
/// dense rotations, one for each head of keys, one for all of values; values centred, both clipped. 5: as 0 with other numbers and a
/// sliding window.
Artifact served_artifact(Windows windows = {}, std::int64_t golden_tokens = 50);

}  // namespace kvq::test
