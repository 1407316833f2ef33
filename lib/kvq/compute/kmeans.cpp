#include <kvq/compute/blas.h>
#include <kvq/compute/kmeans.h>
#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/core/random.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>

// Nearly all the time goes into the distances of all rows to all centroids. A float matrix product gives them fast, but
// only up to rounding that grows with the norms, not with the distance: |x|^2 - 2 x.c + |c|^2 cancels. Two measures
// keep that harmless. Rows and centroids are multiplied less a vector near their middle, which leaves distances as they
// are. And a product never decides alone: it bounds the distance from both sides, and centroids whose bounds overlap
// are compared in double.

namespace kvq {

namespace {

using Index = std::int64_t;

/// Rows in one block of a parallel loop; between 64 and 512 makes no difference to the products' speed.
constexpr Index kBlockRows = 256;
/// Rows in one block of the seeding: OpenBLAS does not repack operands of products this small, which doubles the speed.
constexpr Index kSeedBlockRows = 128;
/// Rows of one cluster that one thread sums.
constexpr Index kPieceRows = 1024;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kUnit = 0x1p-24f;  // largest relative error of one rounding to float

Index blocks_of(Index count, Index size) { return (count + size - 1) / size; }
std::size_t at(Index i) { return static_cast<std::size_t>(i); }

/// |x - c|^2 in double. Eight running sums, so that the compiler may use vectors without changing the order.
double squared_distance(const float* x, const float* c, Index dim) {
  double lanes[8] = {};
  Index j = 0;
  for (; j + 8 <= dim; j += 8)
    for (Index lane = 0; lane < 8; ++lane) {
      const double e = double{x[j + lane]} - double{c[j + lane]};
      lanes[lane] += e * e;
    }
  for (; j < dim; ++j) lanes[j % 8] += (double{x[j]} - double{c[j]}) * (double{x[j]} - double{c[j]});
  return std::accumulate(lanes, lanes + 8, 0.0);
}

/// A matrix [n, D] as the caller passed it, and minus a fixed vector, with the norms of rows that bounds need.
struct Centered {
  std::span<const float> original;   ///< [n, D]
  std::vector<float> rows;           ///< [n, D]
  std::vector<double> squared_norm;  ///< [n] of the centered rows
  Index dim;
  Index count() const { return static_cast<Index>(squared_norm.size()); }
  const float* original_row(Index t) const { return original.data() + t * dim; }
  const float* row(Index t) const { return rows.data() + t * dim; }
};

Centered centered(std::span<const float> rows, std::span<const float> middle) {
  const auto dim = static_cast<Index>(middle.size()), count = static_cast<Index>(rows.size()) / dim;
  Centered out{rows, std::vector<float>(rows.size()), std::vector<double>(at(count)), dim};
  const std::vector<float> origin(at(dim), 0.0f);
  parallel_for(blocks_of(count, kBlockRows), [&](Index block) {
    for (Index t = block * kBlockRows; t < std::min(count, (block + 1) * kBlockRows); ++t) {
      float* x = out.rows.data() + t * dim;
      for (Index j = 0; j < dim; ++j) x[j] = rows[at(t * dim + j)] - middle[at(j)];
      out.squared_norm[at(t)] = squared_distance(x, origin.data(), dim);
    }
  });
  return out;
}

// ---- means

/// Row numbers by group, in order of row number within a group; group g is [start[g], start[g + 1]).
struct Groups {
  std::vector<Index> order, start;
};

Groups group(std::span<const std::int32_t> assignment, Index clusters) {
  Groups out{std::vector<Index>(assignment.size()), std::vector<Index>(at(clusters) + 1, 0)};
  for (const std::int32_t k : assignment) ++out.start[at(k) + 1];
  std::partial_sum(out.start.begin(), out.start.end(), out.start.begin());
  std::vector<Index> next(out.start.begin(), out.start.end() - 1);
  for (std::size_t t = 0; t < assignment.size(); ++t) out.order[at(next[at(assignment[t])]++)] = static_cast<Index>(t);
  return out;
}

/// How many rows ahead to prefetch. Rows of a group lie apart in memory: without prefetching, waiting takes twice as
/// long as adding.
constexpr Index kAhead = 2;
void prefetch(const float* row, Index dim) {
  constexpr Index kCacheLine = 16;
  for (Index j = 0; j < dim; j += kCacheLine) __builtin_prefetch(row + j);
}

/// Sets each centroid to the mean of its rows; a centroid without rows stays. Threads take pieces of groups with fixed
/// borders, and the pieces' sums are added in order.
void move_to_means(std::span<const float> rows, std::span<const std::int32_t> assignment, std::span<float> centroids,
                   Index dim) {
  struct Piece {
    Index cluster, first, last;
  };
  const Index clusters = static_cast<Index>(centroids.size()) / dim;
  const Groups groups = group(assignment, clusters);
  std::vector<Piece> pieces;
  for (Index k = 0; k < clusters; ++k)
    for (Index first = groups.start[at(k)]; first < groups.start[at(k) + 1]; first += kPieceRows)
      pieces.push_back({k, first, std::min(first + kPieceRows, groups.start[at(k) + 1])});

  std::vector<double> sums(pieces.size() * at(dim), 0.0);
  parallel_for(static_cast<Index>(pieces.size()), [&](Index piece) {
    double* sum = sums.data() + piece * dim;
    for (Index i = pieces[at(piece)].first; i < pieces[at(piece)].last; ++i) {
      const float* x = rows.data() + groups.order[at(i)] * dim;
      if (i + kAhead < pieces[at(piece)].last) prefetch(rows.data() + groups.order[at(i + kAhead)] * dim, dim);
      for (Index j = 0; j < dim; ++j) sum[j] += double{x[j]};
    }
  });

  for (std::size_t p = 0; p < pieces.size();) {
    const Index k = pieces[p].cluster;
    double* total = sums.data() + p * at(dim);
    for (++p; p < pieces.size() && pieces[p].cluster == k; ++p)
      for (std::size_t j = 0; j < at(dim); ++j) total[j] += sums[p * at(dim) + j];
    const auto size = static_cast<double>(groups.start[at(k) + 1] - groups.start[at(k)]);
    for (Index j = 0; j < dim; ++j) centroids[at(k * dim + j)] = static_cast<float>(total[j] / size);
  }
}

std::vector<float> mean_of(std::span<const float> rows, Index dim) {
  std::vector<float> mean(at(dim), 0.0f);
  move_to_means(rows, std::vector<std::int32_t>(rows.size() / at(dim), 0), mean, dim);
  return mean;
}

// ---- nearest centroids

/// Four floats: a vector that every machine has. The loops over a row of products take four vectors at a time.
typedef float Floats __attribute__((vector_size(16)));
constexpr Index kWidth = 4, kLanes = 4 * kWidth;

Floats load(const float* from) {
  Floats to;
  std::memcpy(&to, from, sizeof to);
  return to;
}

/// Bounds of the score |c|^2 / 2 - x.c, which orders centroids as the distance does, given the float product `dot` of a
/// row and a centroid: low - dot - reach * norm <= score <= high - dot + reach * norm. Filled up to whole vectors with
/// centroids at infinity.
struct Bounds {
  std::vector<float> low, high, norm;  ///< [C, rounded up to kLanes]
  Index count = 0;                     ///< C
  float largest_norm = 0.0f;
  Index stride() const { return static_cast<Index>(norm.size()); }
};

Bounds bounds_of(const Centered& centroids) {
  // Covers rounding of |c|^2, of the centered centroid and of the sums that use the bound, with a wide margin. The
  // absolute part covers products so small that they lose digits.
  constexpr float kRelative = 16 * kUnit, kAbsolute = 1e-36f;
  const Index count = centroids.count(), stride = blocks_of(count, kLanes) * kLanes;
  Bounds out;
  out.low.assign(at(stride), kInfinity);
  out.high.assign(at(stride), kInfinity);
  out.norm.assign(at(stride), 0.0f);
  out.count = count;
  for (std::size_t k = 0; k < at(count); ++k) {
    const auto half = static_cast<float>(0.5 * centroids.squared_norm[k]);
    out.low[k] = half * (1.0f - kRelative) - kAbsolute;
    out.high[k] = half * (1.0f + kRelative) + kAbsolute;
    out.norm[k] = static_cast<float>(std::sqrt(centroids.squared_norm[k]));
    out.largest_norm = std::max(out.largest_norm, out.norm[k]);
  }
  return out;
}

/// Bound on the error of a float product of length `dim`, divided by |c|, for any order of summation: dim roundings of
/// terms of at most |x||c|, and some for centering and for sums. If the product may overflow, the bound is infinite, so
/// that every centroid is compared in double.
float reach_of(double row_squared_norm, Index dim, const Bounds& bounds) {
  const auto norm = static_cast<float>(std::sqrt(row_squared_norm));
  if (!(norm * bounds.largest_norm < 1e36f)) return kInfinity;
  return static_cast<float>(dim + 16) * kUnit * norm;
}

/// The smallest upper bound of all scores of a row; NaN is ignored.
float smallest_high(const float* dots, const Bounds& bounds, float reach) {
  const float *high = bounds.high.data(), *norm = bounds.norm.data();
  Floats smallest[kLanes / kWidth];
  std::fill(std::begin(smallest), std::end(smallest), Floats{} + kInfinity);
  for (Index k = 0; k < bounds.stride(); k += kLanes)
    for (Index i = 0; i < kLanes / kWidth; ++i) {
      const Index from = k + i * kWidth;
      const Floats bound = load(high + from) - load(dots + from) + reach * load(norm + from);
      smallest[i] = bound < smallest[i] ? bound : smallest[i];
    }
  float result = kInfinity;
  for (const Floats& four : smallest)
    for (Index i = 0; i < kWidth; ++i) result = std::min(result, four[i]);
  return result;
}

/// Whether each of kLanes scores from `k` on is above `limit`; NaN is not.
bool all_above(const float* dots, const Bounds& bounds, Index k, float reach, float limit) {
  const float *low = bounds.low.data(), *norm = bounds.norm.data();
  auto above = Floats{} == Floats{};
  for (Index from = k; from < k + kLanes; from += kWidth)
    above &= load(low + from) - load(dots + from) - reach * load(norm + from) > limit;
  std::int64_t halves[2];
  std::memcpy(halves, &above, sizeof halves);
  return (halves[0] & halves[1]) == -1;
}

/// Calls visit(k) in order for each centroid whose score may be at most `limit`, until it returns false.
template <typename Visit>
void for_each_within(const float* dots, const Bounds& bounds, float reach, float limit, Visit&& visit) {
  for (Index k = 0; k < bounds.stride(); k += kLanes) {
    if (all_above(dots, bounds, k, reach, limit)) continue;
    for (Index i = k; i < std::min(bounds.count, k + kLanes); ++i)
      if (!(bounds.low[at(i)] - dots[i] - reach * bounds.norm[at(i)] > limit) && !visit(i)) return;
  }
}

std::int32_t nearest(const float* x, const Centered& centroids, const float* dots, const Bounds& bounds, float reach) {
  constexpr double kUnknown = -1.0;
  Index best = -1;
  double best_distance = kUnknown;
  const auto distance = [&](Index k) { return squared_distance(x, centroids.original_row(k), centroids.dim); };
  for_each_within(dots, bounds, reach, smallest_high(dots, bounds, reach), [&](Index k) {
    if (best < 0) {
      best = k;
      return true;
    }
    if (best_distance == kUnknown) best_distance = distance(best);
    if (best_distance == 0.0) return false;
    const double other = distance(k);
    if (other < best_distance) {
      best = k;
      best_distance = other;
    }
    return true;
  });
  return static_cast<std::int32_t>(best);
}

/// @param middle  [D] the vector that was subtracted from the rows of `data`
std::vector<std::int32_t> assign(const Centered& data, std::span<const float> centroids,
                                 std::span<const float> middle) {
  const Centered centers = centered(centroids, middle);
  const Bounds bounds = bounds_of(centers);
  const Index dim = data.dim, stride = bounds.stride();
  std::vector<std::int32_t> assignment(at(data.count()));
  parallel_for(blocks_of(data.count(), kBlockRows), [&](Index block) {
    const Index first = block * kBlockRows, count = std::min(kBlockRows, data.count() - first);
    static thread_local std::vector<float> dots;  // kept: fresh pages for every block cost a tenth of the time
    dots.resize(at(kBlockRows * stride));
    blas::gemm_nt(count, bounds.count, dim, 1.0f, data.row(first), dim, centers.rows.data(), dim, dots.data(), stride);
    for (Index i = 0; i < count; ++i) {
      const float reach = reach_of(data.squared_norm[at(first + i)], dim, bounds);
      assignment[at(first + i)] =
          nearest(data.original_row(first + i), centers, dots.data() + i * stride, bounds, reach);
    }
  });
  return assignment;
}

// ---- seeding

/// Greedy k-means++ on the centered rows.
class Seeding {
 public:
  Seeding(const Centered& data, RandomStream& random)
      : data_(data),
        random_(random),
        blocks_(blocks_of(data.count(), kSeedBlockRows)),
        closest_(at(data.count()), kInfinity) {}

  /// Row numbers of the seeds.
  std::vector<Index> choose(int clusters) {
    const int trials = seeding_trials(clusters);
    std::vector<Index> seeds = {best_of({any_row()})};
    while (seeds.size() < static_cast<std::size_t>(clusters)) {
      if (!(total_ > 0.0) || std::isinf(total_)) {  // every row is a seed already, or distances overflow
        seeds.push_back(any_row());
        continue;
      }
      std::vector<Index> candidates;
      candidates.reserve(static_cast<std::size_t>(trials));
      for (int i = 0; i < trials; ++i) candidates.push_back(row_by_distance());
      seeds.push_back(best_of(candidates));
    }
    return seeds;
  }

 private:
  Index any_row() {
    const Index row = static_cast<Index>(random_.next_uniform() * static_cast<double>(data_.count()));
    return std::min(row, data_.count() - 1);
  }

  /// A row with probability in proportion to its squared distance to the nearest seed.
  Index row_by_distance() {
    const double target = random_.next_uniform() * total_;
    double before = 0.0;
    Index block = 0;
    while (block + 1 < blocks_ && before + block_sums_[at(block)] < target) before += block_sums_[at(block++)];
    Index found = 0;
    for (Index t = block * kSeedBlockRows; t < std::min(data_.count(), (block + 1) * kSeedBlockRows); ++t) {
      if (closest_[at(t)] == 0.0f) continue;
      found = t;  // rounding may leave the sum below the target after the last row
      before += double{closest_[at(t)]};
      if (before >= target) break;
    }
    return found;
  }

  /// The candidate that leaves the smallest sum of squared distances, the first of equal ones; makes it a seed.
  Index best_of(const std::vector<Index>& candidates) {
    const auto trials = static_cast<Index>(candidates.size());
    std::vector<float> centers;
    for (const Index t : candidates) centers.insert(centers.end(), data_.row(t), data_.row(t) + data_.dim);
    distances_.resize(at(trials * data_.count()));
    std::vector<double> sums(at(trials * blocks_));
    parallel_for(blocks_, [&](Index block) { measure_block(block, candidates, centers, sums); });

    Index best = 0;
    total_ = std::numeric_limits<double>::infinity();
    for (Index i = 0; i < trials; ++i) {
      const auto begin = sums.begin() + i * blocks_;
      const double total = std::accumulate(begin, begin + blocks_, 0.0);
      if (i > 0 && !(total < total_)) continue;
      best = i;
      total_ = total;
    }
    block_sums_.assign(sums.begin() + best * blocks_, sums.begin() + (best + 1) * blocks_);
    closest_.assign(distances_.begin() + best * data_.count(), distances_.begin() + (best + 1) * data_.count());
    return candidates[at(best)];
  }

  /// For each candidate: the squared distance of each row of a block to the nearest seed if the candidate becomes a
  /// seed, and the sum of these distances.
  void measure_block(Index block, const std::vector<Index>& candidates, const std::vector<float>& centers,
                     std::vector<double>& sums) {
    const auto trials = static_cast<Index>(candidates.size());
    const Index first = block * kSeedBlockRows, count = std::min(kSeedBlockRows, data_.count() - first),
                dim = data_.dim;
    static thread_local std::vector<float> dots;
    dots.resize(at(trials * kSeedBlockRows));
    blas::gemm_nt(trials, count, dim, 1.0f, centers.data(), dim, data_.row(first), dim, dots.data(), kSeedBlockRows);
    for (Index i = 0; i < trials; ++i) {
      const float* dot = dots.data() + i * kSeedBlockRows;
      const float* closest = closest_.data() + first;
      float* distance = distances_.data() + i * data_.count() + first;
      double sum = 0.0;
      for (Index t = 0; t < count; ++t) {
        distance[t] = std::min(closest[t], distance_of(first + t, candidates[at(i)], dot[t], closest[t]));
        sum += double{distance[t]};
      }
      sums[at(i * blocks_ + block)] = sum;
    }
  }

  /// |x - c|^2 from the float product, or in double if cancellation would leave few digits.
  float distance_of(Index row, Index center, float dot, float closest) const {
    if (closest == 0.0f) return 0.0f;
    const double norms = data_.squared_norm[at(row)] + data_.squared_norm[at(center)],
                 distance = norms - 2.0 * double{dot};
    if (distance > 4.0 * kUnit * static_cast<double>(data_.dim + 16) * norms) return static_cast<float>(distance);
    return static_cast<float>(squared_distance(data_.row(row), data_.row(center), data_.dim));
  }

  const Centered& data_;
  RandomStream& random_;
  Index blocks_;
  std::vector<float> closest_, distances_;  ///< [n] to the nearest seed; [trials, n] should a candidate become one
  std::vector<double> block_sums_;          ///< of closest_
  double total_ = 0.0;
};

// ---- Lloyd

/// |x_t - c(x_t)|^2 of each row, in double.
std::vector<double> distances_to_own(std::span<const float> rows, const KMeansResult& state, Index dim) {
  const auto count = static_cast<Index>(state.assignment.size());
  std::vector<double> distances(at(count));
  parallel_for(blocks_of(count, kBlockRows), [&](Index block) {
    for (Index t = block * kBlockRows; t < std::min(count, (block + 1) * kBlockRows); ++t)
      distances[at(t)] =
          squared_distance(rows.data() + t * dim, state.centroids.data() + state.assignment[at(t)] * dim, dim);
  });
  return distances;
}

/// Gives each empty cluster the row farthest from its centroid, the first of equal ones, as long as some row differs
/// from its centroid. No such move makes the inertia larger.
int repair_empty(std::span<const float> rows, KMeansResult& state, Index dim) {
  std::vector<bool> empty(state.centroids.size() / at(dim), true);
  for (const std::int32_t k : state.assignment) empty[at(k)] = false;
  if (std::find(empty.begin(), empty.end(), true) == empty.end()) return 0;

  const std::vector<double> distances = distances_to_own(rows, state, dim);
  std::vector<Index> farthest;
  for (std::size_t t = 0; t < distances.size(); ++t)
    if (distances[t] > 0.0) farthest.push_back(static_cast<Index>(t));
  std::sort(farthest.begin(), farthest.end(), [&](Index a, Index b) {
    return distances[at(a)] != distances[at(b)] ? distances[at(a)] > distances[at(b)] : a < b;
  });

  std::size_t repaired = 0;
  for (std::size_t k = 0; k < empty.size() && repaired < farthest.size(); ++k)
    if (empty[k]) state.assignment[at(farthest[repaired++])] = static_cast<std::int32_t>(k);
  return static_cast<int>(repaired);
}

/// Mean over the channels of the rows' variance.
double mean_variance(const Centered& data) {
  return std::accumulate(data.squared_norm.begin(), data.squared_norm.end(), 0.0) /
         static_cast<double>(data.rows.size());
}

KMeansResult run(const Centered& data, std::span<const float> middle, const KMeansOptions& options,
                 RandomStream random) {
  KMeansResult state;
  for (const Index t : Seeding(data, random).choose(options.clusters))
    state.centroids.insert(state.centroids.end(), data.original_row(t), data.original_row(t) + data.dim);
  const double small = options.tolerance * mean_variance(data);
  for (bool moving = true; moving && state.iterations < options.max_iterations; ++state.iterations) {
    state.assignment = assign(data, state.centroids, middle);
    state.repaired += repair_empty(data.original, state, data.dim);
    const std::vector<float> before = state.centroids;
    move_to_means(data.original, state.assignment, state.centroids, data.dim);
    moving = squared_distance(before.data(), state.centroids.data(), static_cast<Index>(before.size())) > small;
  }
  state.assignment = assign(data, state.centroids, middle);
  const std::vector<double> distances = distances_to_own(data.original, state, data.dim);
  state.inertia = std::accumulate(distances.begin(), distances.end(), 0.0);
  return state;
}

}  // namespace

// Restart 0 uses the seed itself. The odd step between restarts keeps the streams of neighboring seeds apart.
RandomStream seeding_stream(const KMeansOptions& options, int restart) {
  return {options.seed + 0x9E3779B97F4A7C15u * static_cast<std::uint64_t>(restart), RandomStream::Purpose::kmeans,
          static_cast<std::uint32_t>(options.layer), static_cast<std::uint32_t>(options.head)};
}

int seeding_trials(int clusters) { return 2 + static_cast<int>(std::log(static_cast<double>(clusters))); }

void check_clusters(const KMeansOptions& options, std::int64_t count) {
  const Index most = std::min<Index>(kMaxClusters, count);
  if (options.clusters < 1 || options.clusters > most)
    throw Error{
        ErrorKind::usage,
        fmt::format("k-means: expected 1 to {} clusters and one row or more for each, found {} clusters for {} rows",
                    kMaxClusters, options.clusters, count)};
  if (options.restarts < 1)
    throw Error{ErrorKind::usage, fmt::format("k-means: expected 1 restart or more, found {}", options.restarts)};
  if (options.max_iterations < 0)
    throw Error{ErrorKind::usage,
                fmt::format("k-means: expected 0 iterations or more, found {}", options.max_iterations)};
  if (!(options.tolerance >= 0.0))
    throw Error{ErrorKind::usage, fmt::format("k-means: expected a tolerance >= 0, found {}", options.tolerance)};
}

KMeansResult kmeans(std::span<const float> rows, int dim, const KMeansOptions& options) {
  KVQ_ASSERT(dim >= 1 && rows.size() % static_cast<std::size_t>(dim) == 0);
  check_clusters(options, static_cast<Index>(rows.size()) / dim);
  const std::vector<float> middle = mean_of(rows, dim);
  if (!std::all_of(middle.begin(), middle.end(), [](float x) { return std::isfinite(x); }))
    throw Error{ErrorKind::numerical, "k-means: expected finite rows, found NaN or infinity"};
  const Centered data = centered(rows, middle);
  KMeansResult best = run(data, middle, options, seeding_stream(options, 0));
  for (int restart = 1; restart < options.restarts; ++restart) {
    KMeansResult other = run(data, middle, options, seeding_stream(options, restart));
    if (other.inertia < best.inertia) best = std::move(other);
  }
  return best;
}

std::vector<std::int32_t> nearest_centroids(std::span<const float> rows, std::span<const float> centroids, int dim) {
  KVQ_ASSERT(dim >= 1 && rows.size() % static_cast<std::size_t>(dim) == 0);
  KVQ_ASSERT(!centroids.empty() && centroids.size() % static_cast<std::size_t>(dim) == 0);
  const std::vector<float> middle = mean_of(centroids, dim);
  return assign(centered(rows, middle), centroids, middle);
}

}  // namespace kvq
