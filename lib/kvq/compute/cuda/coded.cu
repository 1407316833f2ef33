#include <kvq/compute/cuda/coded_kernels.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math_constants.h>

// Each line that rounds is one of codec/uniform.cpp and codec/group_coder.cpp; this file is compiled without fused
// operations. A warp has one row. Groups with a plain scale are coded by one lane each, in the codec's order of
// operations; the states of a trellis are divided over the lanes.

namespace kvq::cuda {

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kWarps = 4;
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
__device__ __forceinline__ float energy(const float* x, int count) {
  return tree_sum(count, [&](int i) { return x[i] * x[i]; });
}

__device__ __forceinline__ int clamp_code(float y, float n) { return static_cast<int>(least(most(y, 0.0f), n)); }

/// x becomes quantized. @param x  [count]
__device__ void code_affine(const CodedGroup& group, float* x) {
  float lo = x[0], hi = x[0];
  for (int i = 1; i < group.count; ++i) lo = least(lo, x[i]), hi = most(hi, x[i]);
  const float range = least(hi - lo, kLargest) + 0.0f, n = static_cast<float>((1 << group.bits) - 1);
  const float scale = round_to(group.type, range / n);
  if (group.zero == ZeroKind::floating) {
    const float minimum = round_to(group.type, lo) + 0.0f;
    for (int i = 0; i < group.count; ++i) {
      const int code = scale == 0.0f ? 0 : clamp_code((x[i] - minimum) / scale + 0.5f, n);
      x[i] = static_cast<float>(code) * scale + minimum;
    }
    return;
  }
  const float zero = scale == 0.0f ? 0.0f : round_to(group.type, floorf(-lo / scale + 0.5f));
  for (int i = 0; i < group.count; ++i) {
    const int code = scale == 0.0f ? 0 : clamp_code(floorf(x[i] / scale + 0.5f) + zero, n);
    x[i] = (static_cast<float>(code) - zero) * scale;
  }
}

__device__ __forceinline__ int mid_rise_code(float x, float step, int bits) {
  const int half = 1 << (bits - 1);
  if (step == 0.0f) return half;
  const float limit = static_cast<float>(half), y = least(most(x / step, -limit), limit);
  const int truncated = static_cast<int>(y), floored = truncated - (y < static_cast<float>(truncated) ? 1 : 0);
  return min(floored, half - 1) + half;
}
__device__ __forceinline__ int odd_level(int code, int bits) { return 2 * code - (1 << bits) + 1; }

__device__ void code_symmetric(const CodedGroup& group, float* x) {
  const int bits = group.bits, count = group.count;
  float step, scale;
  if (group.rule == ScaleRule::absmax) {
    float largest = 0.0f;
    for (int i = 0; i < count; ++i) largest = most(largest, fabsf(x[i]));
    step = scale = round_to(group.type, 2.0f * largest / static_cast<float>((1 << bits) - 1));
  } else {
    const float e = energy(x, count), sigma = sqrtf(e / static_cast<float>(count));
    step = round_to(group.type, kGaussianStep[bits] * sigma);
    scale = 0.0f;
    if (step != 0.0f) {
      int norm = 0;
      for (int i = 0; i < count; ++i) {
        const int level = odd_level(mid_rise_code(x[i], step, bits), bits);
        norm += level * level;
      }
      const float n = static_cast<float>(norm);
      if (group.rule == ScaleRule::norm) {
        scale = round_to(group.type, sqrtf(4.0f * e / n));
      } else {
        const float products = tree_sum(
            count, [&](int i) { return x[i] * static_cast<float>(odd_level(mid_rise_code(x[i], step, bits), bits)); });
        scale = round_to(group.type, 2.0f * products / n);
      }
    }
  }
  for (int i = 0; i < count; ++i)
    x[i] = scale * (static_cast<float>(odd_level(mid_rise_code(x[i], step, bits), bits)) * 0.5f);
}

__device__ __forceinline__ float first_scale(ScaleType type, float energy, int count) {
  return round_to(type, sqrtf(energy / static_cast<float>(count)));
}
/// @param value  i -> decoded value of channel i, with the scale left out
template <typename F>
__device__ __forceinline__ float stored_scale(const CodedGroup& group, const float* x, F value, float e, float d) {
  const float n = tree_sum(group.count, [&](int i) { return value(i) * value(i); });
  if (group.rule == ScaleRule::rms || n == 0.0f) return d;
  if (group.rule == ScaleRule::norm) return round_to(group.type, sqrtf(e / n));
  const float refit = tree_sum(group.count, [&](int i) { return x[i] * value(i); }) / n;
  return refit != refit ? d : round_to(group.type, refit);
}

__device__ void code_codebook(const CodedGroup& group, float* x) {
  const int size = 1 << group.bits;
  const float *table = group.table, *thresholds = table + size;
  const float e = energy(x, group.count), d = first_scale(group.type, e, group.count);
  const auto value = [&](int i) {
    const float y = x[i] / d;
    int code = 0;
    for (int t = 0; t < size - 1; ++t) code += thresholds[t] <= y ? 1 : 0;
    return table[code];
  };
  const float scale = d == 0.0f ? 0.0f : stored_scale(group, x, value, e, d);
  for (int i = 0; i < group.count; ++i) x[i] = scale * (d == 0.0f ? table[size / 2] : value(i));
}

/// Memory of one warp that searches a trellis.
struct TrellisMemory {
  float* y;              ///< [count] channels with the scale left out, then the decoded values
  float* cost[2];        ///< [states]
  std::uint8_t* oldest;  ///< [steps, states]
};

/// One Viterbi step: `to` from `from`. All lanes call it.
__device__ __forceinline__ void trellis_step(const CodedGroup& group, float y, const float* from, float* to,
                                             std::uint8_t* oldest, int lane) {
  const int branches = 1 << group.bits, states = 1 << (group.bits * group.memory);
  for (int state = lane; state < states; state += 32) {
    float best = 0.0f;
    int code = 0;
    for (int p = 0; p < branches; ++p) {
      const int window = state + p * states;
      const float e = y - group.table[window], reached = from[window >> group.bits] + e * e;
      if (p == 0 || reached < best) best = reached, code = p;
    }
    to[state] = best;
    oldest[state] = static_cast<std::uint8_t>(code);
  }
  __syncwarp();
}

/// All lanes call it. x becomes quantized.
__device__ void code_trellis(const CodedGroup& group, float* x, const TrellisMemory& memory, int lane) {
  const int bits = group.bits, count = group.count, states = 1 << (bits * group.memory);
  float e = 0.0f;
  if (lane == 0) e = energy(x, count);
  e = __shfl_sync(kAll, e, 0);
  const float d = first_scale(group.type, e, count);
  if (d == 0.0f) {  // the scale is 0, whatever the codes
    for (int i = lane; i < count; i += 32) x[i] = 0.0f;
    __syncwarp();
    return;
  }
  for (int i = lane; i < count; i += 32) memory.y[i] = x[i] / d;
  const auto step_back = [&](int state, const std::uint8_t* oldest) {
    return state >> bits | static_cast<int>(oldest[state]) << (bits * (group.memory - 1));
  };
  // The state at the seam, by a run over the last channels and then the first ones.
  const int length = min(count, kSeamLength);
  for (int z = lane; z < states; z += 32) memory.cost[0][z] = 0.0f;
  __syncwarp();
  for (int i = 0; i < 2 * length; ++i)
    trellis_step(group, i < length ? memory.y[count - length + i] : memory.y[i - length], memory.cost[i & 1],
                 memory.cost[(i + 1) & 1], memory.oldest + i * states, lane);
  int seam = 0;
  if (lane == 0) {
    const float* cost = memory.cost[0];  // after an even number of steps
    for (int z = 1; z < states; ++z)
      if (cost[z] < cost[seam]) seam = z;
    for (int i = 2 * length; i-- > length;) seam = step_back(seam, memory.oldest + i * states);
  }
  seam = __shfl_sync(kAll, seam, 0);
  __syncwarp();
  for (int z = lane; z < states; z += 32) memory.cost[0][z] = z == seam ? 0.0f : CUDART_INF_F;
  __syncwarp();
  for (int i = 0; i < count; ++i)
    trellis_step(group, memory.y[i], memory.cost[i & 1], memory.cost[(i + 1) & 1], memory.oldest + i * states, lane);
  float scale = 0.0f;
  if (lane == 0) {
    // Codes backwards, then values forwards, which replace y.
    int state = seam;
    for (int i = count; i-- > 0;) {
      const int code = state & ((1 << bits) - 1);
      state = step_back(state, memory.oldest + i * states);
      memory.oldest[i * states] = static_cast<std::uint8_t>(code);
    }
    const int mask = (1 << (bits * (group.memory + 1))) - 1;
    int window = 0;
    for (int i = count - group.memory; i < count; ++i) window = window << bits | memory.oldest[i * states];
    for (int i = 0; i < count; ++i) {
      window = (window << bits | memory.oldest[i * states]) & mask;
      memory.y[i] = group.table[window];
    }
    scale = stored_scale(group, x, [&](int i) { return memory.y[i]; }, e, d);
  }
  scale = __shfl_sync(kAll, scale, 0);
  __syncwarp();
  for (int i = lane; i < count; i += 32) x[i] = memory.y[i] * scale;
  __syncwarp();
}

/// The magnitude with so many smaller ones or equal ones before it in order. All lanes call it.
__device__ __forceinline__ float magnitude_of_rank(const float* x, int dim, int rank, int lane) {
  float found = 0.0f;
  for (int i = lane; i < dim; i += 32) {
    const float own = fabsf(x[i]);
    int less = 0, equal = 0;
    for (int j = 0; j < dim; ++j) {
      const float other = fabsf(x[j]);
      less += other < own ? 1 : 0, equal += other == own ? 1 : 0;
    }
    if (less <= rank && rank < less + equal) found = own;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) found = fmaxf(found, __shfl_xor_sync(kAll, found, step));
  return found;  // lanes that found it have the same number, the others 0
}

/// Shared memory of a warp, in floats.
__host__ __device__ constexpr int warp_floats(int dim, bool trellis) {
  return dim + (trellis ? dim + 2 * kMostStates : 0);
}

/// Grid: [warps that take rows in turn, tasks].
template <bool kTrellis>
__global__ void __launch_bounds__(32 * kWarps)
    code_rows_kernel(const CodedRows* tasks, std::uint8_t* survivors, int* failed) {
  extern __shared__ float memory[];
  const CodedRows& task = tasks[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5, dim = task.dim;
  float* x = memory + warp * warp_floats(dim, kTrellis);
  TrellisMemory trellis = {};
  if (kTrellis) {
    trellis.y = x + dim;
    trellis.cost[0] = trellis.y + dim, trellis.cost[1] = trellis.cost[0] + kMostStates;
    trellis.oldest =
        survivors + (std::size_t{blockIdx.y * gridDim.x + blockIdx.x} * kWarps + warp) * survivor_bytes(dim);
  }
  for (int row = static_cast<int>(blockIdx.x) * kWarps + warp; row < task.count;
       row += static_cast<int>(gridDim.x) * kWarps) {
    const float* from = task.rows + std::int64_t{row} * dim;
    bool finite = true;
    for (int i = lane; i < dim; i += 32) {
      const float own = from[i];
      finite = finite && isfinite(own);
      x[i] = task.exact ? round_to_bf16(own) : own;
    }
    __syncwarp();
    if (!__all_sync(kAll, finite)) {
      if (lane == 0) *failed = 1;
      continue;
    }
    if (!task.exact) {
      if (task.clip_index >= 0) {
        const float tau = magnitude_of_rank(x, dim, task.clip_index, lane);
        __syncwarp();
        for (int i = lane; i < dim; i += 32) x[i] = least(most(x[i], -tau), tau);
        __syncwarp();
      }
      for (int g = lane; g < task.num_groups; g += 32) {
        const CodedGroup group = task.groups[g];
        float* own = x + group.first;
        if (group.kind == CodedGroup::Kind::codebook)
          code_codebook(group, own);
        else if (group.kind == CodedGroup::Kind::uniform && group.levels == UniformLevels::affine)
          code_affine(group, own);
        else if (group.kind == CodedGroup::Kind::uniform)
          code_symmetric(group, own);
      }
      __syncwarp();
      if (kTrellis)
        for (int g = 0; g < task.num_groups; ++g)
          if (task.groups[g].kind == CodedGroup::Kind::trellis)
            code_trellis(task.groups[g], x + task.groups[g].first, trellis, lane);
      // Channels of no group.
      for (int i = lane; i < dim; i += 32) {
        bool is_coded = false;
        for (int g = 0; g < task.num_groups && !is_coded; ++g)
          is_coded = i >= task.groups[g].first && i < task.groups[g].first + task.groups[g].count;
        if (!is_coded) x[i] = 0.0f;
      }
      __syncwarp();
    }
    float* to = task.errors + std::int64_t{row} * dim;
    for (int i = lane; i < dim; i += 32) to[i] = task.keeps_rows ? x[i] : x[i] - from[i];
    __syncwarp();
  }
}

__device__ __forceinline__ double sum_of_warp(double x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

constexpr int kTogether = 4;  // rows of a warp at a time

/// Products of rows with the metric: w e M e, w x M e and w x M x of each row. Grid: [rows, tasks].
__global__ void __launch_bounds__(32 * kWarps)
    weigh_kernel(const CodedRows* tasks, int most_rows, bool with_energy, CodedSums* row_sums) {
  extern __shared__ float memory[];
  const CodedRows& task = tasks[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5, dim = task.dim;
  const int first = (static_cast<int>(blockIdx.x) * kWarps + warp) * kTogether;
  float* rows = memory + warp * 2 * kTogether * dim;  // errors, then rows
  for (int r = 0; r < kTogether; ++r)
    for (int i = lane; i < dim; i += 32) {
      const bool exists = first + r < task.count;
      const std::int64_t at = std::int64_t{first + r} * dim + i;
      rows[r * dim + i] = exists ? task.errors[at] : 0.0f;
      rows[(kTogether + r) * dim + i] = exists ? task.rows[at] : 0.0f;
    }
  __syncwarp();
  float total[kTogether] = {}, along[kTogether] = {}, own_energy[kTogether] = {};
  for (int column = lane; column < dim; column += 32) {
    float image[kTogether] = {}, x_image[kTogether] = {};
    if (task.metric) {
      for (int k = 0; k < dim; ++k) {
        const float m = __ldg(task.metric + std::int64_t{k} * dim + column);
#pragma unroll
        for (int r = 0; r < kTogether; ++r) {
          image[r] = fmaf(rows[r * dim + k], m, image[r]);
          if (with_energy) x_image[r] = fmaf(rows[(kTogether + r) * dim + k], m, x_image[r]);
        }
      }
    } else {
#pragma unroll
      for (int r = 0; r < kTogether; ++r)
        image[r] = rows[r * dim + column], x_image[r] = rows[(kTogether + r) * dim + column];
    }
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      const float e = rows[r * dim + column], x = rows[(kTogether + r) * dim + column];
      total[r] = fmaf(e, image[r], total[r]), along[r] = fmaf(x, image[r], along[r]);
      own_energy[r] = fmaf(x, x_image[r], own_energy[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kTogether; ++r) {
    if (first + r >= task.count) break;
    const double w = task.weights ? double{task.weights[first + r]} : 1.0;
    const CodedSums sums{sum_of_warp(total[r]) * w, sum_of_warp(along[r]) * w, sum_of_warp(own_energy[r]) * w};
    if (lane == 0) row_sums[std::int64_t{blockIdx.y} * most_rows + first + r] = sums;
  }
}

constexpr int kAddThreads = 256;
/// Grid: tasks.
__global__ void __launch_bounds__(kAddThreads)
    add_rows_kernel(const CodedRows* tasks, int most_rows, const CodedSums* row_sums, CodedSums* sums) {
  __shared__ CodedSums of_thread[kAddThreads];
  const int thread = static_cast<int>(threadIdx.x);
  CodedSums own;
  for (int row = thread; row < tasks[blockIdx.x].count; row += kAddThreads) {
    const CodedSums& one = row_sums[std::int64_t{blockIdx.x} * most_rows + row];
    own.total += one.total, own.along += one.along, own.energy += one.energy;
  }
  of_thread[thread] = own;
  for (int step = kAddThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (thread >= step) continue;
    const CodedSums& other = of_thread[thread + step];
    CodedSums& mine = of_thread[thread];
    mine.total += other.total, mine.along += other.along, mine.energy += other.energy;
  }
  if (thread == 0) sums[blockIdx.x] = of_thread[0];
}

int divide(int a, int b) { return (a + b - 1) / b; }

}  // namespace

void code_rows(const CodedRows* tasks, int num_tasks, int most_rows, int dim, std::uint8_t* survivors, int* failed,
               CUstream_st* stream) {
  const bool trellis = survivors != nullptr;
  const int bytes = kWarps * warp_floats(dim, trellis) * static_cast<int>(sizeof(float));
  const auto kernel = trellis ? code_rows_kernel<true> : code_rows_kernel<false>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  const int blocks = divide(most_rows, kWarps), most_blocks = kTrellisWarps / kWarps;
  // Tasks with a trellis in turn as far as there is room for their survivors.
  const int at_once = trellis ? max(1, most_blocks / blocks) : num_tasks;
  for (int first = 0; first < num_tasks; first += at_once)
    kernel<<<dim3(static_cast<unsigned>(trellis ? min(blocks, most_blocks) : blocks),
                  static_cast<unsigned>(min(at_once, num_tasks - first))),
             32 * kWarps, static_cast<std::size_t>(bytes), stream>>>(tasks + first, survivors, failed);
}

void weigh_errors(const CodedRows* tasks, int num_tasks, int most_rows, int dim, bool with_energy, CodedSums* row_sums,
                  CodedSums* sums, CUstream_st* stream) {
  const int bytes = kWarps * 2 * kTogether * dim * static_cast<int>(sizeof(float));
  cudaFuncSetAttribute(weigh_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  weigh_kernel<<<dim3(static_cast<unsigned>(divide(most_rows, kWarps * kTogether)), static_cast<unsigned>(num_tasks)),
                 32 * kWarps, static_cast<std::size_t>(bytes), stream>>>(tasks, most_rows, with_energy, row_sums);
  add_rows_kernel<<<static_cast<unsigned>(num_tasks), kAddThreads, 0, stream>>>(tasks, most_rows, row_sums, sums);
}

}  // namespace kvq::cuda
