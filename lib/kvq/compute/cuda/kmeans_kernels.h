#pragma once

#include <kvq/plan/page_layout.h>

#include <cstddef>
#include <cstdint>

struct CUstream_st;

/// Kernels of k-means. Pointers are of the device.
namespace kvq::cuda {

/// Channels are padded to a multiple of this.
inline constexpr int kChannelTile = 64;
/// Rows, and centroids, that a block of assign_rows() compares at a time.
inline constexpr int kRowTile = 128, kCentroidTile = 128;
/// Rows whose distances seeding sums together.
inline constexpr int kSeedRows = 128;
/// Rows that seeding compares for each seed: 2 + floor(ln 4096).
inline constexpr int kMostTrials = 10;
/// Most channels that fit into shared memory with kMostTrials rows.
inline constexpr int kMostClusterDim = 4096;

/// What the host reads of a run after each step.
struct RunState {
  double total;  ///< sum of Clustering::shifts, or of Clustering::own_distances
  int empty;     ///< clusters without rows
  int repaired;  ///< clusters that were given a row, so far
};

/// A row for which float16 products do not decide.
struct OpenRow {
  std::uint32_t row;           ///< run * count + row
  std::int32_t first, second;  ///< the centroids of the two smallest lower bounds
};

/// Sets of equally many rows, and runs of k-means on each: run r clusters set r / runs_of_set. The kernels compare
/// centered rows, (row - middle) * scale, with centroids that are centered likewise.
struct Clustering {
  int sets = 0, runs = 0, runs_of_set = 1;
  int clusters = 0, dim = 0, padded_dim = 0, padded_clusters = 0;
  std::int64_t count = 0;  ///< rows of a set
  int trials = 1;          ///< rows compared for each seed

  // Of the rows.
  const float* rows = nullptr;      ///< [sets, count, dim]
  float* middle = nullptr;          ///< [sets, dim] their mean
  float* largest = nullptr;         ///< [sets] largest magnitude of a row less its middle
  float* scale = nullptr;           ///< [sets] a power of two
  float* centered = nullptr;        ///< [sets, count, padded_dim]
  std::uint16_t* halves = nullptr;  ///< [sets, count, padded_dim] `centered` as float16
  float* norms = nullptr;           ///< [sets, count, 2] |centered|, |centered - halves|
  double* spread = nullptr;         ///< [sets] sum of |centered|^2

  // Of seeding.
  const double* uniforms = nullptr;  ///< [runs, 1 + (clusters - 1) * trials] random numbers in (0, 1)
  int* draws = nullptr;              ///< [runs] random numbers used
  int* best = nullptr;               ///< [runs] trial that became the last seed
  int* tried = nullptr;              ///< [runs] number of candidates for the next seed; 0: no row is far from a seed
  int* candidates = nullptr;         ///< [runs, trials] rows
  int* seeds = nullptr;              ///< [runs, clusters] rows
  float* distances[2] = {};          ///< [runs, trials, count] to the nearest seed if the candidate becomes a seed
  double* block_sums = nullptr;      ///< [runs, trials, blocks of kSeedRows] of `distances`

  // Of Lloyd's algorithm.
  const int* moving = nullptr;               ///< [runs] 0: the run has ended, and kernels leave it as it is
  float* centroids[2] = {};                  ///< [runs, clusters, dim] before and after a step
  std::uint16_t* centroid_halves = nullptr;  ///< [runs, padded_clusters, padded_dim]
  /// [runs, padded_clusters, 2] |c|^2 / 2, or infinity beyond the last cluster, and a bound of |c|
  float* squares = nullptr;
  float* reach = nullptr;         ///< [runs, 2] the largest bound of |c|, and the largest |c - halves| / bound
  std::uint32_t* keys = nullptr;  ///< [runs, count] run * clusters + nearest centroid
  OpenRow* open = nullptr;        ///< [2, runs * count] one of two centroids is nearest; any may be
  int* num_open = nullptr;        ///< [2]
  const std::uint32_t* sorted_keys = nullptr;  ///< [runs * count] ascending
  const std::int32_t* order = nullptr;  ///< [runs * count] row in its set of each sorted key, ascending in a cluster
  std::int32_t* starts = nullptr;       ///< [runs * clusters + 1] first sorted key of each cluster
  double* own_distances = nullptr;      ///< [runs, count] |row - its centroid|^2, unscaled
  double* shifts = nullptr;             ///< [runs, clusters, blocks of channels] |new - old centroid|^2, unscaled
  RunState* states = nullptr;           ///< [runs]

  KVQ_HD std::int64_t seed_blocks() const { return (count + kSeedRows - 1) / kSeedRows; }
};

/// middle and largest.
void measure_rows(const Clustering& clustering, CUstream_st* stream);
/// centered, halves, norms and spread, from middle and scale.
void center_rows(const Clustering& clustering, CUstream_st* stream);

/// seeds, and centroids[0] from them.
void choose_seeds(const Clustering& clustering, CUstream_st* stream);

/// keys, from the centroids[from]. Equals a search in double, the lowest of equal centroids.
void assign_rows(const Clustering& clustering, int from, CUstream_st* stream);
/// starts and states.empty, from sorted_keys.
void find_starts(const Clustering& clustering, CUstream_st* stream);
/// Gives empty clusters the rows that are farthest from their centroids[from], as kvq::kmeans().
void repair_empty(const Clustering& clustering, int from, CUstream_st* stream);
/// centroids[1 - from] = the mean of each cluster's rows, or centroids[from]; shifts; states.total.
void move_to_means(const Clustering& clustering, int from, CUstream_st* stream);
/// own_distances and states.total, from centroids[from].
void add_distances(const Clustering& clustering, int from, CUstream_st* stream);

/// Bytes that the sorts need for so many numbers.
std::size_t sort_bytes(std::int64_t count);
/// Sorts by key; equal keys keep their order. @param memory  sort_bytes()
void sort_pairs(void* memory, std::size_t bytes, const std::uint32_t* keys, std::uint32_t* sorted_keys,
                const std::int32_t* values, std::int32_t* sorted_values, std::int64_t count, int key_bits,
                CUstream_st* stream);
void sort_numbers(void* memory, std::size_t bytes, const float* numbers, float* sorted, std::int64_t count,
                  CUstream_st* stream);
/// values[i] = i % period
void count_up(std::int32_t* values, std::int64_t count, std::int64_t period, CUstream_st* stream);

}  // namespace kvq::cuda
