#include <kvq/compute/cuda/row_scale.cuh>

#include <cuda_runtime.h>

// A warp has one row. Groups are coded by one lane each if they are short, else by all lanes in turn.

namespace kvq::cuda {

namespace {

constexpr int kWarps = 4;
constexpr int kCodingWarps = 2;  ///< of blocks that quantize: small ones fit better into shared memory

/// The magnitude with so many smaller ones or equal ones before it in order. All lanes call it.
__device__ __forceinline__ float magnitude_of_rank(const float* x, int dim, int rank, int lane) {
  // Magnitudes are ordered as their bits are: the bits of the result, the highest first.
  unsigned found = 0;
  for (unsigned bit = 0x40000000u; bit != 0; bit >>= 1) {
    int less = 0;
    for (int i = lane; i < dim; i += 32) less += __float_as_uint(fabsf(x[i])) < (found | bit) ? 1 : 0;
    if (__reduce_add_sync(kAll, less) <= rank) found |= bit;
  }
  return __uint_as_float(found);
}

/// Shared memory of a warp, in floats: whole numbers of 16 bytes.
__host__ __device__ constexpr int warp_floats(int dim, bool trellis, int states) {
  return ((trellis ? 2 * states + nearby_bytes(dim) / 4 + gain_words(dim) + dim : 0) + dim + 3) / 4 * 4;
}
/// Most states of a trellis.
__host__ __device__ constexpr int most_states(bool survivors) { return survivors ? kMostStates : kKnownStates; }

/// Grid: [warps that take rows in turn, tasks].
/// @tparam kRowScale  rows may have one scale; else the compiler leaves out what they need
template <bool kTrellis, bool kRowScale>
__global__ void __launch_bounds__(32 * kCodingWarps, kTrellis ? 11 : 18)
    code_rows_kernel(const CodedRows* tasks, std::uint8_t* survivors, int* failed) {
  extern __shared__ float memory[];
  const CodedRows& task = tasks[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5, dim = task.dim;
  const int states = most_states(survivors != nullptr);
  float* own = memory + warp * warp_floats(dim, kTrellis, states);
  float* x = own + (kTrellis ? 2 * states : 0);
  TrellisMemory trellis = {};
  if (kTrellis) {
    trellis.costs = own, trellis.states = states;
    trellis.y = x + dim;
    if (nearby_bytes(dim) > 0) {
      trellis.gains = reinterpret_cast<unsigned*>(trellis.y + dim);
      trellis.nearby = reinterpret_cast<std::uint8_t*>(trellis.gains + gain_words(dim));
    }
    if (survivors)
      trellis.oldest =
          survivors + (std::size_t{blockIdx.y * gridDim.x + blockIdx.x} * kCodingWarps + warp) * survivor_bytes(dim);
  }
  int coded = 0;  // channels that are in a group
  for (int g = 0; g < task.num_groups; ++g) coded += task.groups[g].count;
  for (int row = static_cast<int>(blockIdx.x) * kCodingWarps + warp; row < task.count;
       row += static_cast<int>(gridDim.x) * kCodingWarps) {
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
      if (kRowScale && task.row_scale) {
        code_row_scale<kTrellis>(task, x, trellis, lane);
      } else if (32 * task.num_groups > dim) {
        for (int g = lane; g < task.num_groups; g += 32) {
          const CodedGroup group = task.groups[g];
          code_group(OneLane(), group, x + group.first);
        }
      } else {
        for (int g = 0; g < task.num_groups; ++g) {
          const CodedGroup group = task.groups[g];
          code_group(OneWarp{lane}, group, x + group.first);
        }
      }
      __syncwarp();
      if (kTrellis && !(kRowScale && task.row_scale))
        for (int g = 0; g < task.num_groups; ++g)
          if (task.groups[g].kind == CodedGroup::Kind::trellis)
            code_trellis(task.groups[g], x + task.groups[g].first, trellis, lane);
      // Channels of no group.
      for (int i = lane; i < dim && coded < dim; i += 32) {
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

void code_rows(const CodedRows* tasks, int num_tasks, int most_rows, int dim, bool trellis, bool row_scale,
               std::uint8_t* survivors, int* failed, CUstream_st* stream) {
  const int bytes =
      kCodingWarps * warp_floats(dim, trellis, most_states(survivors != nullptr)) * static_cast<int>(sizeof(float));
  const auto kernel = row_scale ? trellis ? code_rows_kernel<true, true> : code_rows_kernel<false, true>
                      : trellis ? code_rows_kernel<true, false>
                                : code_rows_kernel<false, false>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  const int blocks = divide(most_rows, kCodingWarps), most_blocks = kTrellisWarps / kCodingWarps;
  // Tasks in turn as far as there is room for their survivors.
  const int at_once = survivors ? max(1, most_blocks / blocks) : num_tasks;
  for (int first = 0; first < num_tasks; first += at_once)
    kernel<<<dim3(static_cast<unsigned>(survivors ? min(blocks, most_blocks) : blocks),
                  static_cast<unsigned>(min(at_once, num_tasks - first))),
             32 * kCodingWarps, static_cast<std::size_t>(bytes), stream>>>(tasks + first, survivors, failed);
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
