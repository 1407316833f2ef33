#include <kvq/compute/cuda/kmeans_device.cuh>
#include <kvq/device/ptx.cuh>

#include <math_constants.h>

// Nearly all the time goes into the products of all rows and all centroids. Tensor cores multiply float16 copies of the
// centered rows. As in compute/kmeans.cpp, a product never decides alone: it bounds the score |c|^2 / 2 - x.c, which
// orders centroids as the distance does, from both sides. nearest_two_kernel keeps the three smallest lower bounds of a
// row. If the second one is not above the upper bound of the first centroid, the row is open, and distances in double
// decide: between two centroids if the third bound is high enough, else among all of them.

namespace kvq::cuda {

namespace {

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

}  // namespace

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

}  // namespace kvq::cuda
