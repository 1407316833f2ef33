#include <kvq/compute/cuda/kmeans_kernels.h>

#include <kvq/device/ptx.cuh>

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math_constants.h>

// Nearly all the time goes into the products of all rows and all centroids. Tensor cores multiply float16 copies of the
// centered rows. As in compute/kmeans.cpp, a product never decides alone: it bounds the score |c|^2 / 2 - x.c, which
// orders centroids as the distance does, from both sides. nearest_two() keeps the three smallest lower bounds of a row.
// If the second one is not above the upper bound of the first centroid, the row is open, and distances in double
// decide: between two centroids if the third bound is high enough, else among all of them. Distances and means have the
// order of operations of compute/kmeans.cpp, so the same assignment gives the same centroids.

namespace kvq::cuda {

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kPieceRows = 1024;  ///< of compute/kmeans.cpp
constexpr int kMeanChannels = 128, kMostSlots = 8;

__device__ __forceinline__ float max_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, step));
  return x;
}
template <typename T>
__device__ __forceinline__ T sum_of_warp(T x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}
/// The sum over the threads of a block, for thread 0. @param memory  [blockDim.x / 32]
__device__ double sum_of_block(double x, double* memory) {
  x = sum_of_warp(x);
  if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = x;
  __syncthreads();
  double total = 0.0;
  if (threadIdx.x == 0)
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += memory[warp];
  return total;
}

// ---- rows

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

/// A lane's channels of a row or centroid as float16, and the norms of the row and of what float16 leaves out.
/// @param x  of a channel
template <typename F>
__device__ __forceinline__ float2 round_to_halves(const Clustering& c, std::uint16_t* halves, F x) {
  double norm = 0.0, rest = 0.0;
  for (int j = static_cast<int>(threadIdx.x % 32); j < c.padded_dim; j += 32) {
    const float value = x(j);
    const __half half = __float2half_rn(value);
    const double left = double{value} - double{__half2float(half)};
    halves[j] = __half_as_ushort(half);
    norm += double{value} * double{value};
    rest += left * left;
  }
  return make_float2(static_cast<float>(sqrt(sum_of_warp(norm))), static_cast<float>(sqrt(sum_of_warp(rest))));
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

// ---- seeding

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

// ---- nearest centroids

/// A warp has one centroid.
__global__ void center_centroids_kernel(Clustering c, int from) {
  const int run = static_cast<int>(blockIdx.y), set = run / c.runs_of_set;
  const int k = static_cast<int>(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
  if (k >= c.padded_clusters || !c.moving[run]) return;
  const bool used = k < c.clusters;
  const float* x = c.centroids[from] + (std::int64_t{run} * c.clusters + k) * c.dim;
  const std::int64_t to = std::int64_t{run} * c.padded_clusters + k;
  const float scale = c.scale[set];
  const float2 norms = round_to_halves(c, c.centroid_halves + to * c.padded_dim, [&](int j) {
    return used && j < c.dim ? (x[j] - c.middle[set * c.dim + j]) * scale : 0.0f;
  });
  if (threadIdx.x % 32 != 0) return;
  const float half_square = static_cast<float>(0.5 * double{norms.x} * double{norms.x});
  // A centroid near the middle loses digits in float16. A larger norm keeps its error from widening all bounds.
  const float norm = fmaxf(norms.x, 1024.0f * norms.y);
  reinterpret_cast<float2*>(c.squares)[to] = make_float2(used ? half_square : CUDART_INF_F, norm);
  if (norm == 0.0f) return;
  atomicMax(reinterpret_cast<int*>(c.reach) + 2 * run, __float_as_int(norm));
  atomicMax(reinterpret_cast<int*>(c.reach) + 2 * run + 1, __float_as_int(norms.y / norm));
}

/// The three smallest lower bounds of a row's scores, and the centroids of two of them.
struct Smallest {
  float low[3];
  int centroid[2];

  __device__ __forceinline__ void add(float s, int k) {
    const bool first = s < low[0], second = s < low[1];
    low[2] = fminf(low[2], fmaxf(low[1], s));
    low[1] = fminf(low[1], fmaxf(low[0], s));
    low[0] = fminf(low[0], s);
    centroid[1] = first ? centroid[0] : second ? k : centroid[1];
    centroid[0] = first ? k : centroid[0];
  }
  __device__ __forceinline__ void add(const Smallest& other) {
    add(other.low[0], other.centroid[0]);
    add(other.low[1], other.centroid[1]);
    low[2] = fminf(low[2], other.low[2]);
  }
};

constexpr int kThreads = 256, kStages = 3;
constexpr int kRowBytes = kChannelTile * 2;
constexpr int kRowTileBytes = kRowTile * kRowBytes, kCentroidTileBytes = kCentroidTile * kRowBytes;
/// Chunks of channels of a row tile that stay in shared memory; of longer rows each chunk is read for each tile of
/// centroids again.
constexpr int kMostChunks = 4;
constexpr int shared_bytes(int chunks) {
  return chunks <= kMostChunks ? chunks * kRowTileBytes + kStages * kCentroidTileBytes
                               : kStages * (kRowTileBytes + kCentroidTileBytes);
}

/// Where 16 bytes of a tile's row are: swizzled by row.
__device__ __forceinline__ unsigned place(int row, int sixteen) {
  return row * kRowBytes + ((sixteen ^ (row & 7)) * 16);
}

/// Starts copies of a chunk of channels of kRows rows; rows from `count` on repeat the last one.
template <int kRows>
__device__ __forceinline__ void copy_tile(unsigned to, const std::uint16_t* from, std::int64_t first,
                                          std::int64_t count, int padded_dim, int chunk) {
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kRows * 8; i += kThreads) {
    const int row = i / 8, sixteen = i % 8;
    ptx::cp_async_16(to + place(row, sixteen),
                     from + min(first + row, count - 1) * padded_dim + chunk * kChannelTile + sixteen * 8);
  }
}

/// Bound on the error of a score, divided by |c|. The terms: float16 of the row, float16 of the centroid, sums of a
/// tensor core and centering, the rounding of |c|^2 / 2.
/// @param row    Clustering::norms of the row
/// @param reach  Clustering::reach of the run
__device__ __forceinline__ float score_error(float2 row, float2 reach, int dim) {
  constexpr float kUnit = 0x1p-24f, kMargin = 1.01f;
  return kMargin * (row.y + (row.x + row.y) * reach.y + static_cast<float>(4 * (dim + 64)) * kUnit * row.x +
                    16 * kUnit * reach.x);
}

/// A block has kRowTile rows of a run and all centroids, a tile at a time; a warp 32 rows and half of the tile.
__global__ void __launch_bounds__(kThreads, 2) nearest_two_kernel(Clustering c) {
  extern __shared__ uint4 tiles[];
  const int run = static_cast<int>(blockIdx.y), set = run / c.runs_of_set;
  if (!c.moving[run]) return;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32), half = warp % 2;
  const int chunks = c.padded_dim / kChannelTile, steps = chunks * (c.padded_clusters / kCentroidTile);
  const bool keeps_rows = chunks <= kMostChunks;
  const std::int64_t first = std::int64_t{blockIdx.x} * kRowTile;
  const std::uint16_t* rows = c.halves + set * c.count * c.padded_dim;
  const std::uint16_t* centroids = c.centroid_halves + std::int64_t{run} * c.padded_clusters * c.padded_dim;
  const float2* squares = reinterpret_cast<const float2*>(c.squares) + std::int64_t{run} * c.padded_clusters;
  const unsigned row_tiles = ptx::shared_address(tiles),
                 centroid_tiles = row_tiles + (keeps_rows ? chunks : kStages) * kRowTileBytes;

  const auto copy_step = [&](int step) {
    if (step < steps) {
      const int chunk = step % chunks, stage = step % kStages;
      copy_tile<kCentroidTile>(centroid_tiles + stage * kCentroidTileBytes, centroids,
                               std::int64_t{step / chunks} * kCentroidTile, c.padded_clusters, c.padded_dim, chunk);
      if (!keeps_rows || step < chunks)
        copy_tile<kRowTile>(row_tiles + (keeps_rows ? chunk : stage) * kRowTileBytes, rows, first, c.count,
                            c.padded_dim, chunk);
    }
    ptx::cp_async_commit_group();
  };
  for (int step = 0; step < kStages - 1; ++step) copy_step(step);

  Smallest found[4];  // of rows g, g + 8, g + 16, g + 24 with g = lane / 4
  float errors[4];
  const auto row_in_tile = [&](int i) { return warp / 2 * 32 + i * 8 + lane / 4; };
  const auto score_error_of = [&](int i) {
    const float2* norms = reinterpret_cast<const float2*>(c.norms) + set * c.count;
    return score_error(norms[min(first + row_in_tile(i), c.count - 1)], reinterpret_cast<const float2*>(c.reach)[run],
                       c.dim);
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    found[i] = {{CUDART_INF_F, CUDART_INF_F, CUDART_INF_F}, {0, 0}};
    errors[i] = score_error_of(i);
  }
  float dots[2][8][4];
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ptx::cp_async_wait_group<kStages - 2>();
    __syncthreads();
    copy_step(step + kStages - 1);
    const int chunk = step % chunks, stage = step % kStages;
    if (chunk == 0) {
#pragma unroll
      for (auto& tile : dots)
#pragma unroll
        for (auto& four : tile)
#pragma unroll
          for (float& x : four) x = 0.0f;
    }
    const unsigned row_tile = row_tiles + (keeps_rows ? chunk : stage) * kRowTileBytes,
                   centroid_tile = centroid_tiles + stage * kCentroidTileBytes;
#pragma unroll
    for (int k = 0; k < kChannelTile / 16; ++k) {
      unsigned a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        ptx::ldmatrix_x4(a[m], row_tile + place(warp / 2 * 32 + m * 16 + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        unsigned b[4];
        ptx::ldmatrix_x4(
            b, centroid_tile + place(half * 64 + n * 8 + (lane & 7) + (lane >> 4) * 8, 2 * k + (lane >> 3 & 1)));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          ptx::mma_m16n8k16_fp16(dots[m][n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
          ptx::mma_m16n8k16_fp16(dots[m][n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
        }
      }
    }
    if (chunk + 1 < chunks) continue;
    const int tile_first = step / chunks * kCentroidTile + half * 64 + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int k = tile_first + n * 8;
      const float4 two = *reinterpret_cast<const float4*>(squares + k);
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          found[2 * m + i].add(fmaf(-errors[2 * m + i], two.y, two.x - dots[m][n][2 * i]), k);
          found[2 * m + i].add(fmaf(-errors[2 * m + i], two.w, two.z - dots[m][n][2 * i + 1]), k + 1);
        }
    }
  }
  ptx::cp_async_wait_group<0>();

  // The four lanes of a row, then the two warps.
#pragma unroll
  for (Smallest& one : found)
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      Smallest other;
#pragma unroll
      for (int i = 0; i < 3; ++i) other.low[i] = __shfl_xor_sync(kAll, one.low[i], step);
#pragma unroll
      for (int i = 0; i < 2; ++i) other.centroid[i] = __shfl_xor_sync(kAll, one.centroid[i], step);
      one.add(other);
    }
  __syncthreads();
  Smallest* memory = reinterpret_cast<Smallest*>(tiles);  // [kRowTile]
  if (half == 1 && lane % 4 == 0)
#pragma unroll
    for (int i = 0; i < 4; ++i) memory[row_in_tile(i)] = found[i];
  __syncthreads();
  if (half == 1 || lane % 4 != 0) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::int64_t t = first + row_in_tile(i);
    if (t >= c.count) continue;
    found[i].add(memory[row_in_tile(i)]);
    const std::int64_t row = run * c.count + t;
    const int nearest = found[i].centroid[0];
    c.keys[row] = static_cast<std::uint32_t>(run * c.clusters + nearest);
    const float high = found[i].low[0] + 2 * errors[i] * squares[nearest].y;
    if (found[i].low[1] > high) continue;  // a NaN leaves the row open
    const bool any = !(found[i].low[2] > high);
    OpenRow* open = c.open + (any ? c.runs * c.count : 0);
    open[atomicAdd(c.num_open + (any ? 1 : 0), 1)] = {static_cast<std::uint32_t>(row), nearest, found[i].centroid[1]};
  }
}

/// squared_distance() of compute/kmeans.cpp by eight lanes: all get the result.
__device__ __forceinline__ double squared_distance(const float* x, const float* y, int dim) {
  const int lane = static_cast<int>(threadIdx.x % 8);
  double own = 0.0;
#pragma unroll 8
  for (int j = lane; j < dim; j += 8) {
    const double e = double{x[j]} - double{y[j]};
    own = __dadd_rn(own, __dmul_rn(e, e));
  }
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = __dadd_rn(sum, __shfl_sync(kAll, own, i, 8));
  return sum;
}

struct RowOfRun {
  int run;
  const float* x;
  const float* centroids;
};
__device__ __forceinline__ RowOfRun row_of(const Clustering& c, std::int64_t row, int from) {
  const int run = static_cast<int>(row / c.count), set = run / c.runs_of_set;
  return {run, c.rows + (set * c.count + row % c.count) * c.dim,
          c.centroids[from] + std::int64_t{run} * c.clusters * c.dim};
}

/// Eight lanes have one open row with two candidates.
__global__ void nearest_of_two_kernel(Clustering c, int from) {
  const int count = c.num_open[0], stride = static_cast<int>(gridDim.x * (blockDim.x / 8));
  for (int i = static_cast<int>(blockIdx.x * (blockDim.x / 8) + threadIdx.x / 8); i - i % 4 < count; i += stride) {
    const OpenRow open = c.open[min(i, count - 1)];
    const RowOfRun row = row_of(c, open.row, from);
    const int low = min(open.first, open.second), high = max(open.first, open.second);
    const double of_low = squared_distance(row.x, row.centroids + std::int64_t{low} * c.dim, c.dim),
                 of_high = squared_distance(row.x, row.centroids + std::int64_t{high} * c.dim, c.dim);
    if (i < count && threadIdx.x % 8 == 0)
      c.keys[open.row] = static_cast<std::uint32_t>(row.run * c.clusters + (of_high < of_low ? high : low));
  }
}

/// The smaller distance, or the lower one of equally distant centroids.
struct Nearest {
  double distance;
  int centroid;

  __device__ __forceinline__ void take(double other, int k) {
    if (other < distance || (other == distance && k < centroid)) distance = other, centroid = k;
  }
};

/// A block has one open row; eight lanes have one centroid.
__global__ void __launch_bounds__(256) nearest_of_all_kernel(Clustering c, int from) {
  extern __shared__ float row_memory[];
  __shared__ Nearest of_warps[8];
  const int count = c.num_open[1];
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const std::uint32_t number = c.open[c.runs * c.count + i].row;
    const RowOfRun row = row_of(c, number, from);
    for (int j = static_cast<int>(threadIdx.x); j < c.dim; j += static_cast<int>(blockDim.x)) row_memory[j] = row.x[j];
    __syncthreads();
    Nearest best = {CUDART_INF, c.clusters};
    const int groups = static_cast<int>(blockDim.x / 8);
    for (int first = 0; first < c.clusters; first += groups) {  // all lanes take part in each distance
      const int k = first + static_cast<int>(threadIdx.x / 8), own = min(k, c.clusters - 1);
      const double distance = squared_distance(row_memory, row.centroids + std::int64_t{own} * c.dim, c.dim);
      if (k < c.clusters) best.take(distance, k);
    }
#pragma unroll
    for (int step = 8; step < 32; step *= 2)
      best.take(__shfl_xor_sync(kAll, best.distance, step), __shfl_xor_sync(kAll, best.centroid, step));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (const Nearest& other : of_warps) best.take(other.distance, other.centroid);
      c.keys[number] = static_cast<std::uint32_t>(row.run * c.clusters + best.centroid);
    }
    __syncthreads();
  }
}

// ---- means

__global__ void starts_kernel(Clustering c) {
  const std::int64_t clusters = std::int64_t{c.runs} * c.clusters, rows = c.runs * c.count,
                     key = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (key > clusters) return;
  const auto first_from = [&](std::int64_t wanted) {
    std::int64_t low = 0, high = rows;
    while (low < high) {
      const std::int64_t middle = (low + high) / 2;
      if (c.sorted_keys[middle] < wanted)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  };
  const std::int64_t start = first_from(key);
  c.starts[key] = static_cast<std::int32_t>(start);
  if (key < clusters && (start == rows || c.sorted_keys[start] != key)) atomicAdd(&c.states[key / c.clusters].empty, 1);
}

/// A block has one cluster, and kMeanChannels channels of it: threadIdx.y is the piece of rows.
__global__ void means_kernel(Clustering c, int from) {
  __shared__ double sums[kMostSlots][kMeanChannels];
  const int run = static_cast<int>(blockIdx.y), set = run / c.runs_of_set, x = static_cast<int>(threadIdx.x),
            j = static_cast<int>(blockIdx.z) * kMeanChannels + x, slot = static_cast<int>(threadIdx.y);
  const std::int64_t cluster = std::int64_t{run} * c.clusters + blockIdx.x, size = cluster * c.dim;
  const bool moves = c.moving[run] != 0, used = j < c.dim;
  const std::int64_t begin = moves ? c.starts[cluster] : 0, end = moves ? c.starts[cluster + 1] : 0;
  const float* rows = c.rows + set * c.count * c.dim;
  double total = 0.0;
  for (std::int64_t piece = begin; piece < end; piece += std::int64_t{blockDim.y} * kPieceRows) {
    const std::int64_t first = piece + std::int64_t{slot} * kPieceRows, last = min(first + kPieceRows, end);
    double sum = 0.0;
    if (used)
#pragma unroll 16
      for (std::int64_t i = first; i < last; ++i) sum += double{rows[std::int64_t{c.order[i]} * c.dim + j]};
    sums[slot][x] = sum;
    __syncthreads();
    if (slot == 0)
      for (int s = 0; s < static_cast<int>(blockDim.y) && piece + std::int64_t{s} * kPieceRows < end; ++s)
        total += sums[s][x];
    __syncthreads();
  }
  double shift = 0.0;
  if (used && slot == 0) {
    const float before = c.centroids[from][size + j];
    const float after = end > begin ? static_cast<float>(total / static_cast<double>(end - begin)) : before;
    c.centroids[1 - from][size + j] = after;
    shift = (double{after} - double{before}) * (double{after} - double{before});
  }
  shift = sum_of_warp(shift);
  if (slot == 0 && x % 32 == 0) sums[0][x / 32] = shift;
  __syncthreads();
  if (slot == 0 && x == 0) {
    shift = 0.0;
    for (int warp = 0; warp < kMeanChannels / 32; ++warp) shift += sums[0][warp];
    c.shifts[cluster * gridDim.z + blockIdx.z] = shift;
  }
}

/// The sum of `count` numbers of each run, in one order.
__global__ void totals_kernel(const double* numbers, std::int64_t count, RunState* states) {
  __shared__ double memory[32];
  double sum = 0.0;
  for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += numbers[blockIdx.x * count + i];
  sum = sum_of_block(sum, memory);
  if (threadIdx.x == 0) states[blockIdx.x].total = sum;
}

/// Eight lanes have one row.
__global__ void distances_kernel(Clustering c, int from) {
  const std::int64_t count = c.runs * c.count, i = std::int64_t{blockIdx.x} * (blockDim.x / 8) + threadIdx.x / 8,
                     number = min(i, count - 1);
  const RowOfRun row = row_of(c, number, from);
  const std::int64_t centroid = std::int64_t{c.keys[number]} - std::int64_t{row.run} * c.clusters;
  const double distance = squared_distance(row.x, row.centroids + centroid * c.dim, c.dim);
  if (i < count && threadIdx.x % 8 == 0) c.own_distances[number] = distance;
}

/// A block has one run, and gives a row to one empty cluster after the other.
__global__ void repair_kernel(Clustering c) {
  __shared__ double distances[32];
  __shared__ std::int64_t rows[32];
  const std::int64_t run = blockIdx.x, first = run * c.count;
  if (c.states[run].empty == 0 || !c.moving[run]) return;
  for (int k = 0; k < c.clusters; ++k) {
    const std::int64_t cluster = run * c.clusters + k;
    if (c.starts[cluster + 1] > c.starts[cluster]) continue;
    // The largest distance, of the first row that has it.
    double largest = 0.0;
    std::int64_t farthest = c.count;
    for (std::int64_t t = threadIdx.x; t < c.count; t += blockDim.x)
      if (c.own_distances[first + t] > largest) largest = c.own_distances[first + t], farthest = t;
    const auto take = [&](double distance, std::int64_t t) {
      if (distance > largest || (distance == largest && t < farthest)) largest = distance, farthest = t;
    };
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      take(__shfl_xor_sync(kAll, largest, step), __shfl_xor_sync(kAll, farthest, step));
    if (threadIdx.x % 32 == 0) distances[threadIdx.x / 32] = largest, rows[threadIdx.x / 32] = farthest;
    __syncthreads();
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) take(distances[warp], rows[warp]);
    __syncthreads();
    if (farthest == c.count) return;  // every row is at its centroid
    if (threadIdx.x == 0) {
      c.own_distances[first + farthest] = 0.0;
      c.keys[first + farthest] = static_cast<std::uint32_t>(cluster);
      c.states[run].repaired += 1;
    }
    __syncthreads();
  }
}

__global__ void count_up_kernel(std::int32_t* values, std::int64_t count, std::int64_t period) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) values[i] = static_cast<std::int32_t>(i % period);
}

unsigned blocks_of(std::int64_t count, std::int64_t size) { return static_cast<unsigned>((count + size - 1) / size); }

/// means_kernel: so many pieces at a time as a cluster of average size has.
dim3 mean_threads(const Clustering& c) {
  const std::int64_t pieces = c.count / c.clusters / kPieceRows + 1;
  return {kMeanChannels, static_cast<unsigned>(pieces < kMostSlots ? pieces : kMostSlots)};
}
unsigned mean_blocks(const Clustering& c) { return blocks_of(c.dim, kMeanChannels); }

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

void assign_rows(const Clustering& c, int from, CUstream_st* stream) {
  const auto runs = static_cast<unsigned>(c.runs);
  constexpr unsigned kBlocks = 512;
  const int bytes = shared_bytes(c.padded_dim / kChannelTile);
  cudaFuncSetAttribute(nearest_two_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  cudaMemsetAsync(c.reach, 0, 2 * runs * sizeof(float), stream);
  cudaMemsetAsync(c.num_open, 0, 2 * sizeof(int), stream);
  center_centroids_kernel<<<dim3(blocks_of(c.padded_clusters, 8), runs), 256, 0, stream>>>(c, from);
  nearest_two_kernel<<<dim3(blocks_of(c.count, kRowTile), runs), kThreads, static_cast<std::size_t>(bytes), stream>>>(
      c);
  nearest_of_two_kernel<<<kBlocks, 256, 0, stream>>>(c, from);
  nearest_of_all_kernel<<<2 * kBlocks, 256, static_cast<std::size_t>(c.dim) * sizeof(float), stream>>>(c, from);
}

void find_starts(const Clustering& c, CUstream_st* stream) {
  cudaMemset2DAsync(&c.states->empty, sizeof(RunState), 0, sizeof(int), static_cast<std::size_t>(c.runs), stream);
  starts_kernel<<<blocks_of(std::int64_t{c.runs} * c.clusters + 1, 256), 256, 0, stream>>>(c);
}

void repair_empty(const Clustering& c, int from, CUstream_st* stream) {
  distances_kernel<<<blocks_of(c.runs * c.count, 32), 256, 0, stream>>>(c, from);
  repair_kernel<<<static_cast<unsigned>(c.runs), 1024, 0, stream>>>(c);
}

void move_to_means(const Clustering& c, int from, CUstream_st* stream) {
  const auto runs = static_cast<unsigned>(c.runs);
  means_kernel<<<dim3(static_cast<unsigned>(c.clusters), runs, mean_blocks(c)), mean_threads(c), 0, stream>>>(c, from);
  totals_kernel<<<runs, 1024, 0, stream>>>(c.shifts, std::int64_t{c.clusters} * mean_blocks(c), c.states);
}

void add_distances(const Clustering& c, int from, CUstream_st* stream) {
  distances_kernel<<<blocks_of(c.runs * c.count, 32), 256, 0, stream>>>(c, from);
  totals_kernel<<<static_cast<unsigned>(c.runs), 1024, 0, stream>>>(c.own_distances, c.count, c.states);
}

void count_up(std::int32_t* values, std::int64_t count, std::int64_t period, CUstream_st* stream) {
  count_up_kernel<<<blocks_of(count, 256), 256, 0, stream>>>(values, count, period);
}

}  // namespace kvq::cuda
