#include <kvq/compute/cuda/kmeans_device.cuh>

#include <math_constants.h>

// Steps of Lloyd's algorithm behind the assignment: means, empty clusters, distances.

namespace kvq::cuda {

namespace {

constexpr int kPieceRows = 1024;  ///< of compute/kmeans.cpp
constexpr int kMeanChannels = 128, kMostSlots = 8;

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

/// means_kernel: so many pieces at a time as a cluster of average size has.
dim3 mean_threads(const Clustering& c) {
  const std::int64_t pieces = c.count / c.clusters / kPieceRows + 1;
  return {kMeanChannels, static_cast<unsigned>(pieces < kMostSlots ? pieces : kMostSlots)};
}
unsigned mean_blocks(const Clustering& c) { return blocks_of(c.dim, kMeanChannels); }

}  // namespace

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
