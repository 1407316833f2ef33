#include <kvq/compute/cuda/kmeans_device.cuh>

#include <math_constants.h>

// Centered copies of the rows to cluster, and greedy k-means++ on them.

namespace kvq::cuda {

namespace {

__device__ __forceinline__ float max_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, step));
  return x;
}
/// NaN counts as infinite.
__global__ void largest_kernel(Clustering c) {
  const int set = static_cast<int>(blockIdx.y);
  const std::int64_t size = c.count * c.dim, stride = std::int64_t{gridDim.x} * blockDim.x;
  const float* rows = c.rows + set * size;
  float largest = 0.0f;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += stride) {
    const float x = fabsf(rows[i] - c.middle[set * c.dim + i % c.dim]);
    largest = fmaxf(largest, x <= CUDART_MAX_NORMAL_F ? x : CUDART_INF_F);
  }
  largest = max_of_warp(largest);
  // Magnitudes are ordered as their bits are.
  if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<int*>(c.largest) + set, __float_as_int(largest));
}

/// A warp has one row.
__global__ void center_kernel(Clustering c) {
  const int set = static_cast<int>(blockIdx.y);
  const std::int64_t t = std::int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  if (t >= c.count) return;
  const std::int64_t row = set * c.count + t;
  const float* x = c.rows + row * c.dim;
  const float scale = c.scale[set];
  float* centered = c.centered + row * c.padded_dim;
  const float2 norms = round_to_halves(c, c.halves + row * c.padded_dim, [&](int j) {
    const float value = j < c.dim ? (x[j] - c.middle[set * c.dim + j]) * scale : 0.0f;
    centered[j] = value;
    return value;
  });
  if (threadIdx.x % 32 == 0) reinterpret_cast<float2*>(c.norms)[row] = norms;
}

__global__ void spread_kernel(Clustering c) {
  __shared__ double memory[32];
  const std::int64_t first = blockIdx.x * c.count;
  double sum = 0.0;
  for (std::int64_t t = threadIdx.x; t < c.count; t += blockDim.x) {
    const double norm = c.norms[2 * (first + t)];
    sum += norm * norm;
  }
  sum = sum_of_block(sum, memory);
  if (threadIdx.x == 0) c.spread[blockIdx.x] = sum;
}

/// For each candidate: the squared distance of each row of a block to the nearest seed if the candidate becomes a seed,
/// and the sum of these distances. Eight lanes have one row.
__global__ void __launch_bounds__(256) seed_distances_kernel(Clustering c, int from, bool first_seed) {
  extern __shared__ float4 shared[];
  const int run = static_cast<int>(blockIdx.y), set = run / c.runs_of_set, tried = c.tried[run];
  if (tried == 0) return;
  const int quads = c.padded_dim / 4, lane = static_cast<int>(threadIdx.x % 8);
  const float4* rows = reinterpret_cast<const float4*>(c.centered) + set * c.count * quads;
  float* measured = reinterpret_cast<float*>(shared + c.trials * quads);  // [trials, kSeedRows]
  for (int i = static_cast<int>(threadIdx.x); i < tried * quads; i += static_cast<int>(blockDim.x))
    shared[i] = rows[std::int64_t{c.candidates[run * c.trials + i / quads]} * quads + i % quads];
  __syncthreads();

  const std::int64_t first = std::int64_t{blockIdx.x} * kSeedRows;
  const float* closest = c.distances[from] + (std::int64_t{run} * c.trials + c.best[run]) * c.count;
  for (int i = static_cast<int>(threadIdx.x / 8); i < kSeedRows; i += static_cast<int>(blockDim.x / 8)) {
    const std::int64_t t = min(first + i, c.count - 1);
    float sums[kMostTrials] = {};
    for (int q = lane; q < quads; q += 8) {
      const float4 x = rows[t * quads + q];
#pragma unroll
      for (int trial = 0; trial < kMostTrials; ++trial) {
        if (trial >= tried) break;
        const float4 y = shared[trial * quads + q];
        const float dx = x.x - y.x, dy = x.y - y.y, dz = x.z - y.z, dw = x.w - y.w;
        sums[trial] = fmaf(dw, dw, fmaf(dz, dz, fmaf(dy, dy, fmaf(dx, dx, sums[trial]))));
      }
    }
    const float before = first_seed ? CUDART_INF_F : closest[t];
#pragma unroll
    for (int trial = 0; trial < kMostTrials; ++trial) {
      if (trial >= tried) break;
#pragma unroll
      for (int step = 4; step > 0; step /= 2) sums[trial] += __shfl_xor_sync(kAll, sums[trial], step);
      if (lane == 0) measured[trial * kSeedRows + i] = first + i < c.count ? fminf(before, sums[trial]) : 0.0f;
    }
  }
  __syncthreads();

  for (int trial = static_cast<int>(threadIdx.x / 32); trial < tried; trial += static_cast<int>(blockDim.x / 32)) {
    const std::int64_t of_trial = std::int64_t{run} * c.trials + trial;
    double sum = 0.0;
    for (int i = static_cast<int>(threadIdx.x % 32); i < kSeedRows; i += 32) {
      const float distance = measured[trial * kSeedRows + i];
      if (first + i < c.count) c.distances[1 - from][of_trial * c.count + first + i] = distance;
      sum += double{distance};
    }
    sum = sum_of_warp(sum);
    if (threadIdx.x % 32 == 0) c.block_sums[of_trial * c.seed_blocks() + blockIdx.x] = sum;
  }
}

/// The first i with sum of values 0 .. i of at least `target`, in a warp; `before` becomes the sum of those before i,
/// and -1 is the result if all sums are smaller.
template <typename F>
__device__ std::int64_t find_by_sum(std::int64_t count, double target, double& before, F value) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (std::int64_t first = 0; first < count; first += 32) {
    const double own = first + lane < count ? value(first + lane) : 0.0;
    double sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double other = __shfl_up_sync(kAll, sum, step);
      if (lane >= step) sum += other;
    }
    const bool reached = first + lane < count && own > 0.0 && before + sum >= target;
    if (const unsigned lanes = __ballot_sync(kAll, reached); lanes != 0) {
      const int found = __ffs(static_cast<int>(lanes)) - 1;
      before += __shfl_sync(kAll, sum - own, found);
      return first + found;
    }
    before += __shfl_sync(kAll, sum, 31);
  }
  return -1;
}

/// A row with probability in proportion to its distance to the nearest seed. @param closest  [count] these distances
__device__ int row_by_distance(const Clustering& c, const float* closest, const double* block_sums, double target) {
  double before = 0.0;
  std::int64_t block = find_by_sum(c.seed_blocks(), target, before, [&](std::int64_t i) { return block_sums[i]; });
  // Rounding may leave all sums below the target: the last row that is no seed.
  const bool beyond = block < 0;
  if (beyond)
    for (block = c.seed_blocks() - 1; block > 0 && !(block_sums[block] > 0.0); --block) {
    }
  const std::int64_t first = block * kSeedRows, count = min(std::int64_t{kSeedRows}, c.count - first);
  const std::int64_t found =
      beyond ? -1 : find_by_sum(count, target, before, [&](std::int64_t i) { return double{closest[first + i]}; });
  if (found >= 0) return static_cast<int>(first + found);
  for (std::int64_t i = count - 1; i > 0; --i)
    if (closest[first + i] > 0.0f) return static_cast<int>(first + i);
  return static_cast<int>(first);
}

__device__ int any_row(const Clustering& c, double uniform) {
  return static_cast<int>(
      min(static_cast<std::int64_t>(uniform * static_cast<double>(c.count)), static_cast<std::int64_t>(c.count - 1)));
}

/// Makes the best candidate seed number `step` - 1, and draws candidates for the next seed. A warp has one trial.
/// @param from  the distances of the candidates
__global__ void pick_seed_kernel(Clustering c, int from, int step) {
  __shared__ double totals[kMostTrials];
  __shared__ int best;
  const int run = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x / 32),
            lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t blocks = c.seed_blocks();
  const double* uniforms = c.uniforms + run * (1 + std::int64_t{c.clusters - 1} * c.trials);
  int* candidates = c.candidates + run * c.trials;
  int* seeds = c.seeds + std::int64_t{run} * c.clusters;
  if (step == 0) {
    if (threadIdx.x == 0) {
      candidates[0] = any_row(c, uniforms[0]);
      c.tried[run] = 1, c.draws[run] = 1, c.best[run] = 0;
    }
    return;
  }
  const int tried = c.tried[run], draws = c.draws[run];
  double total = 0.0;
  if (tried > 0) {
    if (warp < tried) {
      const double* sums = c.block_sums + (std::int64_t{run} * c.trials + warp) * blocks;
      for (std::int64_t i = lane; i < blocks; i += 32) total += sums[i];
      total = sum_of_warp(total);
      if (lane == 0) totals[warp] = total;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      best = 0;
      for (int i = 1; i < tried; ++i)
        if (totals[i] < totals[best]) best = i;
      c.best[run] = best;
      seeds[step - 1] = candidates[best];
    }
    __syncthreads();
    total = totals[best];
  }
  if (step == c.clusters) return;
  __syncthreads();
  if (tried == 0 || !(total > 0.0) || isinf(total)) {  // every row is a seed already
    if (threadIdx.x == 0) {
      seeds[step] = any_row(c, uniforms[draws]);
      c.tried[run] = 0, c.draws[run] = draws + 1;
    }
    return;
  }
  const std::int64_t of_best = std::int64_t{run} * c.trials + best;
  const int row = row_by_distance(c, c.distances[from] + of_best * c.count, c.block_sums + of_best * blocks,
                                  uniforms[draws + warp] * total);
  if (lane == 0) candidates[warp] = row;
  if (threadIdx.x == 0) c.tried[run] = c.trials, c.draws[run] = draws + c.trials;
}

__global__ void take_seeds_kernel(Clustering c) {
  const int run = static_cast<int>(blockIdx.y), set = run / c.runs_of_set, cluster = static_cast<int>(blockIdx.x);
  const std::int64_t to = std::int64_t{run} * c.clusters + cluster, row = set * c.count + c.seeds[to];
  for (int j = static_cast<int>(threadIdx.x); j < c.dim; j += static_cast<int>(blockDim.x))
    c.centroids[0][to * c.dim + j] = c.rows[row * c.dim + j];
}

}  // namespace

void measure_rows(const Clustering& c, CUstream_st* stream) {
  cudaMemsetAsync(c.largest, 0, static_cast<std::size_t>(c.sets) * sizeof(float), stream);
  largest_kernel<<<dim3(64, static_cast<unsigned>(c.sets)), 256, 0, stream>>>(c);
}

void center_rows(const Clustering& c, CUstream_st* stream) {
  center_kernel<<<dim3(blocks_of(c.count, 8), static_cast<unsigned>(c.sets)), 256, 0, stream>>>(c);
  spread_kernel<<<static_cast<unsigned>(c.sets), 1024, 0, stream>>>(c);
}

void choose_seeds(const Clustering& c, CUstream_st* stream) {
  const auto runs = static_cast<unsigned>(c.runs);
  const int bytes = c.trials * (c.padded_dim + kSeedRows) * 4;
  cudaFuncSetAttribute(seed_distances_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  for (int step = 0; step <= c.clusters; ++step) {
    pick_seed_kernel<<<runs, 32 * static_cast<unsigned>(c.trials), 0, stream>>>(c, step % 2, step);
    if (step == c.clusters) break;
    seed_distances_kernel<<<dim3(static_cast<unsigned>(c.seed_blocks()), runs), 256, static_cast<std::size_t>(bytes),
                            stream>>>(c, step % 2, step == 0);
  }
  take_seeds_kernel<<<dim3(static_cast<unsigned>(c.clusters), runs), 128, 0, stream>>>(c);
}

}  // namespace kvq::cuda
