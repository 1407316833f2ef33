#pragma once

#include <kvq/compute/cuda/trellis.cuh>

// RowScale of codec/row_scale.h by a warp: the same roundings in the same order.

namespace kvq::cuda {

/// Value of the code of y in a group without a trellis, before gain and scale.
/// @param known  false: the row has no first scale, so y is no number, and the code is the middle one
__device__ __forceinline__ float unit_value(const CodedGroup& group, float y, bool known) {
  if (group.kind == CodedGroup::Kind::codebook) {
    const int size = 1 << group.bits;
    const float* thresholds = group.table + size;
    int code = known ? 0 : size / 2;
    for (int t = 0; known && t < size - 1; ++t) code += thresholds[t] <= y ? 1 : 0;
    return group.table[code];
  }
  const float step = kGaussianStep[group.bits];
  const int code = known ? mid_rise_code(y, step, group.bits) : 1 << (group.bits - 1);
  return step * (static_cast<float>(odd_level(code, group.bits)) * 0.5f);
}

/// The window of a trellis of which all codes are 2^(bits - 1).
__device__ __forceinline__ int middle_window(const CodedGroup& group) {
  int window = 0;
  for (int k = 0; k <= group.memory; ++k) window = window << group.bits | 1 << (group.bits - 1);
  return window;
}

/// Quantizes the row's groups in place. All lanes call it.
/// @tparam kTrellis  groups may have trellises; else `memory` is not used
template <bool kTrellis>
__device__ __forceinline__ void code_row_scale(const CodedRows& task, float* x, const TrellisMemory& memory, int lane) {
  if (task.num_groups == 0) return;
  const OneWarp team{lane};
  const ScaleRule rule = task.groups[0].rule;
  const ScaleType type = task.groups[0].type;
  float length = 0.0f, normalized = 0.0f;  // sums of squares are never -0, so they may begin with 0
  int channels = 0;
  for (int g = 0; g < task.num_groups; ++g) {
    const CodedGroup& group = task.groups[g];
    const float e = energy(team, x + group.first, group.count);
    length = length + e;
    normalized = normalized + e / (group.gain * group.gain);
    channels += group.count;
  }
  const float d = round_to(type, sqrtf(normalized / static_cast<float>(channels)));
  float n = 0.0f, p = 0.0f;
  for (int g = 0; g < task.num_groups; ++g) {
    const CodedGroup group = task.groups[g];
    float* own = x + group.first;
    const float t = group.gain * d;
    const bool searches = kTrellis && group.kind == CodedGroup::Kind::trellis && t != 0.0f;
    if (searches) {
      for (int i = lane; i < group.count; i += 32) memory.y[i] = own[i] / t;
      __syncwarp();
      replace_by_values(group, memory, lane);
    }
    const auto value = [&](int i) {
      if (searches) return memory.y[i];
      if (kTrellis && group.kind == CodedGroup::Kind::trellis)  // no first scale: all codes are the middle one
        return group.table[middle_window(group)];
      return unit_value(group, own[i] / t, t != 0.0f);
    };
    n = n + group.gain * group.gain * team.sum(group.count, [&](int i) { return value(i) * value(i); });
    const float along = team.sum(group.count, [&](int i) { return own[i] * (group.gain * value(i)); });
    p = g == 0 ? along : p + along;
    __syncwarp();
    for_own(team, group.count, [&](int i) { own[i] = group.gain * value(i); });
    __syncwarp();
  }
  const float refit = rule == ScaleRule::norm ? sqrtf(length / n) : p / n;
  const bool keeps_first = rule == ScaleRule::rms || n == 0.0f || refit != refit;
  const float scale = d == 0.0f ? 0.0f : keeps_first ? d : round_to(type, refit);
  for (int g = 0; g < task.num_groups; ++g)
    for (int i = lane; i < task.groups[g].count; i += 32) x[task.groups[g].first + i] *= scale;
  __syncwarp();
}

}  // namespace kvq::cuda
