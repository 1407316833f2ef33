#pragma once

#include "cases.h"

#include <kvq/plan/layer_plan.h>

#include <cstddef>
#include <span>
#include <vector>

namespace kvq::bench {

/// One sequence's cache on the host.
struct HostSequence {
  std::vector<std::byte> pages;   ///< its pages in order
  std::vector<std::byte> window;  ///< its slot of the windows
};

/// Attention of one KV head's query heads, in double, over what the codec reads from the cache.
/// @param rotation_k, rotation_v  of that head; x_rot = x @ R
/// @param q     [Hq / Hkv, D] unrotated
/// @return      [Hq / Hkv, D]
std::vector<double> plain_decode(const DecodeCase& c, const WindowLayout& windows, const HostSequence& sequence,
                                 int kv_head, const TensorPlan& rotation_k, const TensorPlan& rotation_v,
                                 std::span<const float> q, double softmax_scale);

}  // namespace kvq::bench
