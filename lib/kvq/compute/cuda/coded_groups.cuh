#pragma once

#include <kvq/compute/cuda/coded_kernels.h>

#include <cuda_fp16.h>
#include <cuda_runtime.h>

// Quantization of a group of channels, by one lane or by a warp. Each line that rounds is one of codec/uniform.cpp and
// codec/group_coder.cpp, and sums have the same order for any team, so the results are equal. Sources that include this
// file are compiled without fused operations.

namespace kvq::cuda {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr float kLargest = 3.402823466e38f;

__constant__ float kGaussianStep[9] = {0.0f,        1.5957691f,  0.9956867f,   0.58601946f, 0.3352006f,
                                       0.18813878f, 0.10406301f, 0.056867674f, 0.030762387f};

// As std::min and std::max: the first argument if either is NaN.
__device__ __forceinline__ float least(float a, float b) { return b < a ? b : a; }
__device__ __forceinline__ float most(float a, float b) { return a < b ? b : a; }

__device__ __forceinline__ float round_to_bf16(float x) {
  if (x != x) return x;
  const unsigned bits = __float_as_uint(x), rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  if ((rounded & 0x7fffffffu) >= 0x7f800000u) return __uint_as_float((bits & 0x80000000u) | 0x7f7f0000u);
  return __uint_as_float(rounded & 0xffff0000u);
}
__device__ __forceinline__ float round_to(ScaleType type, float x) {
  switch (type) {
    case ScaleType::fp16: return x != x ? x : __half2float(__float2half_rn(least(most(x, -65504.0f), 65504.0f)));
    case ScaleType::bf16: return round_to_bf16(x);
    case ScaleType::fp32: return least(most(x, -kLargest), kLargest);
  }
  return x;
}

/// arithmetic::tree_sum() of f(i), i < count: adds neighbors in pairs, padded with zeros to a power of two.
template <typename F>
__device__ __forceinline__ float tree_sum(int count, F f) {
  float pending[11];  // sums of 1, 2, 4, ... neighbors that wait for as many more
  int width = 1, levels = 0;
  while (width < count) width *= 2, ++levels;
#pragma unroll 1
  for (int i = 0; i < width; ++i) {
    float sum = i < count ? f(i) : 0.0f;
    int level = 0;
#pragma unroll 1
    for (; i >> level & 1; ++level) sum = pending[level] + sum;
    pending[level] = sum;
  }
  return pending[levels];
}

/// One lane that quantizes a group.
struct OneLane {
  template <typename F>
  __device__ __forceinline__ float sum(int count, F f) const {
    return tree_sum(count, f);
  }
  __device__ __forceinline__ int add(int x) const { return x; }
  __device__ __forceinline__ float smallest(float x) const { return x; }
  __device__ __forceinline__ float largest(float x) const { return x; }
  __device__ __forceinline__ int first() const { return 0; }
  __device__ __forceinline__ int step() const { return 1; }
  __device__ __forceinline__ void sync() const {}
};

/// A warp that quantizes a group. All lanes get all results.
struct OneWarp {
  int lane;

  template <typename F>
  __device__ __forceinline__ float sum(int count, F f) const {
    if (count == 128) {  // the most frequent one: neighbors in one lane
      float sum = (f(4 * lane) + f(4 * lane + 1)) + (f(4 * lane + 2) + f(4 * lane + 3));
#pragma unroll
      for (int step = 1; step < 32; step *= 2) sum = sum + __shfl_xor_sync(kAll, sum, step);
      return sum;
    }
    int width = 1;
    while (width < count && width < 32) width *= 2;
    const float all = tree_sum((count + 31) / 32, [&](int chunk) {
      const int i = 32 * chunk + lane;
      float sum = i < count ? f(i) : 0.0f;
      for (int step = 1; step < width; step *= 2) sum = sum + __shfl_xor_sync(kAll, sum, step);
      return sum;
    });
    return __shfl_sync(kAll, all, 0);
  }
  __device__ __forceinline__ int add(int x) const { return __reduce_add_sync(kAll, x); }
  __device__ __forceinline__ float smallest(float x) const {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = least(x, __shfl_xor_sync(kAll, x, step));
    return x;
  }
  __device__ __forceinline__ float largest(float x) const {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = most(x, __shfl_xor_sync(kAll, x, step));
    return x;
  }
  __device__ __forceinline__ int first() const { return lane; }
  __device__ __forceinline__ int step() const { return 32; }
  __device__ __forceinline__ void sync() const { __syncwarp(); }
};

/// f(i) of the channels of a team's lane.
template <typename Team, typename F>
__device__ __forceinline__ void for_own(const Team& team, int count, F f) {
  for (int i = team.first(); i < count; i += team.step()) f(i);
}
template <typename Team>
__device__ __forceinline__ float energy(const Team& team, const float* x, int count) {
  return team.sum(count, [&](int i) { return x[i] * x[i]; });
}

__device__ __forceinline__ int clamp_code(float y, float n) { return static_cast<int>(least(most(y, 0.0f), n)); }

/// x becomes quantized. @param x  [count]
template <typename Team>
__device__ __forceinline__ void code_affine(const Team& team, const CodedGroup& group, float* x) {
  float lo = x[0], hi = x[0];
  for_own(team, group.count, [&](int i) { lo = least(lo, x[i]), hi = most(hi, x[i]); });
  // Zeros of either sign may change places here; the sums with 0 below make them equal.
  lo = team.smallest(lo), hi = team.largest(hi);
  const float range = least(hi - lo, kLargest) + 0.0f, n = static_cast<float>((1 << group.bits) - 1);
  const float scale = round_to(group.type, range / n);
  team.sync();
  if (group.zero == ZeroKind::floating) {
    const float minimum = round_to(group.type, lo) + 0.0f;
    for_own(team, group.count, [&](int i) {
      const int code = scale == 0.0f ? 0 : clamp_code((x[i] - minimum) / scale + 0.5f, n);
      x[i] = static_cast<float>(code) * scale + minimum;
    });
    return;
  }
  const float zero = scale == 0.0f ? 0.0f : round_to(group.type, floorf(-lo / scale + 0.5f));
  for_own(team, group.count, [&](int i) {
    const int code = scale == 0.0f ? 0 : clamp_code(floorf(x[i] / scale + 0.5f) + zero, n);
    x[i] = (static_cast<float>(code) - zero) * scale;
  });
}

__device__ __forceinline__ int mid_rise_code(float x, float step, int bits) {
  const int half = 1 << (bits - 1);
  if (step == 0.0f) return half;
  const float limit = static_cast<float>(half), y = least(most(x / step, -limit), limit);
  const int truncated = static_cast<int>(y), floored = truncated - (y < static_cast<float>(truncated) ? 1 : 0);
  return min(floored, half - 1) + half;
}
__device__ __forceinline__ int odd_level(int code, int bits) { return 2 * code - (1 << bits) + 1; }

template <typename Team>
__device__ __forceinline__ void code_symmetric(const Team& team, const CodedGroup& group, float* x) {
  const int bits = group.bits, count = group.count;
  const auto level = [&](int i, float step) { return odd_level(mid_rise_code(x[i], step, bits), bits); };
  float step, scale;
  if (group.rule == ScaleRule::absmax) {
    float largest = 0.0f;
    for_own(team, count, [&](int i) { largest = most(largest, fabsf(x[i])); });
    step = scale = round_to(group.type, 2.0f * team.largest(largest) / static_cast<float>((1 << bits) - 1));
  } else {
    const float e = energy(team, x, count), sigma = sqrtf(e / static_cast<float>(count));
    step = round_to(group.type, kGaussianStep[bits] * sigma);
    scale = 0.0f;
    if (step != 0.0f) {
      int norm = 0;
      for_own(team, count, [&](int i) { norm += level(i, step) * level(i, step); });
      const float n = static_cast<float>(team.add(norm));
      if (group.rule == ScaleRule::norm)
        scale = round_to(group.type, sqrtf(4.0f * e / n));
      else
        scale = round_to(group.type,
                         2.0f * team.sum(count, [&](int i) { return x[i] * static_cast<float>(level(i, step)); }) / n);
    }
  }
  team.sync();
  for_own(team, count, [&](int i) { x[i] = scale * (static_cast<float>(level(i, step)) * 0.5f); });
}

__device__ __forceinline__ float first_scale(ScaleType type, float energy, int count) {
  return round_to(type, sqrtf(energy / static_cast<float>(count)));
}
/// @param value  i -> decoded value of channel i, with the scale left out
template <typename Team, typename F>
__device__ __forceinline__ float stored_scale(const Team& team, const CodedGroup& group, const float* x, F value,
                                              float e, float d) {
  const float n = team.sum(group.count, [&](int i) { return value(i) * value(i); });
  if (group.rule == ScaleRule::rms || n == 0.0f) return d;
  if (group.rule == ScaleRule::norm) return round_to(group.type, sqrtf(e / n));
  const float refit = team.sum(group.count, [&](int i) { return x[i] * value(i); }) / n;
  return refit != refit ? d : round_to(group.type, refit);
}

template <typename Team>
__device__ __forceinline__ void code_codebook(const Team& team, const CodedGroup& group, float* x) {
  const int size = 1 << group.bits;
  const float *table = group.table, *thresholds = table + size;
  const float e = energy(team, x, group.count), d = first_scale(group.type, e, group.count);
  const auto value = [&](int i) {
    const float y = x[i] / d;
    int code = 0;
    for (int t = 0; t < size - 1; ++t) code += thresholds[t] <= y ? 1 : 0;
    return table[code];
  };
  const float scale = d == 0.0f ? 0.0f : stored_scale(team, group, x, value, e, d);
  team.sync();
  for_own(team, group.count, [&](int i) { x[i] = scale * (d == 0.0f ? table[size / 2] : value(i)); });
}

/// Quantizes a group that has no trellis. A function of its own, because two kernels call it.
template <typename Team>
__device__ __noinline__ void code_group(Team team, const CodedGroup& group, float* x) {
  if (group.kind == CodedGroup::Kind::codebook)
    code_codebook(team, group, x);
  else if (group.kind == CodedGroup::Kind::uniform && group.levels == UniformLevels::affine)
    code_affine(team, group, x);
  else if (group.kind == CodedGroup::Kind::uniform)
    code_symmetric(team, group, x);
}

}  // namespace kvq::cuda
