#pragma once

#include <kvq/core/random.h>

#include <cstdint>
#include <span>
#include <vector>

namespace kvq {

inline constexpr int kMaxClusters = 4096;

struct KMeansOptions {
  int clusters = 16;        ///< C, 1 .. kMaxClusters and at most n
  int max_iterations = 25;  ///< 0 returns the seeds
  double tolerance =
      1e-4;          ///< stops once sum |new - old centroid|^2 <= tolerance * mean channel variance, as scikit-learn
  int restarts = 1;  ///< the run of smallest inertia wins, the first of equal ones
  std::uint64_t seed = 0;
  int layer = 0, head = 0;  ///< select the random stream: each head has its own
};

struct KMeansResult {
  std::vector<float> centroids = {};          ///< [C, D]
  std::vector<std::int32_t> assignment = {};  ///< [n] nearest_centroids() of the rows
  double inertia = 0.0;                       ///< sum_t |x_t - c(x_t)|^2, in double from x - c
  int iterations = 0;                         ///< of the winning run; so is `repaired`
  int repaired = 0;                           ///< how often an empty cluster was given a row
};

/// Lloyd's algorithm on all rows after greedy k-means++ seeding (Arthur and Vassilvitskii 2007; of 2 + floor(ln C) rows
/// drawn for each seed the one that leaves the smallest inertia, as scikit-learn). A cluster that loses all its rows is
/// given the row farthest from its centroid; with fewer distinct rows than C some clusters stay empty, at the centroid
/// of another cluster. The same seed gives the same bytes for any number of threads. Keeps one copy of the rows, minus
/// their mean.
/// @param rows  [n, D], finite
/// @throws      Error{usage} for options out of range or more clusters than rows, Error{numerical} for NaN or infinity
KMeansResult kmeans(std::span<const float> rows, int dim, const KMeansOptions& options);

/// Throws what kmeans() throws for options out of range, or for more clusters than the `count` rows.
void check_clusters(const KMeansOptions& options, std::int64_t count);
/// Random numbers of one restart's seeding: one for the first seed, then seeding_trials() for each seed; or one for a
/// seed that no row is far from.
RandomStream seeding_stream(const KMeansOptions& options, int restart);
int seeding_trials(int clusters);

/// Index of the nearest centroid of each row, the lowest of equal ones. Float products select the candidate centroids,
/// distances in double decide among the candidates: the result equals that of a search in double.
/// @param rows       [n, D]
/// @param centroids  [C, D], C >= 1
/// @return           [n]
std::vector<std::int32_t> nearest_centroids(std::span<const float> rows, std::span<const float> centroids, int dim);

}  // namespace kvq
