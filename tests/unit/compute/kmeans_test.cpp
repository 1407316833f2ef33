#include <kvq/compute/kmeans.h>
#include <kvq/compute/parallel.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

using namespace kvq;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

namespace {

double distance_of(const float* x, const float* c, std::size_t d) {
  double sum = 0.0;
  for (std::size_t j = 0; j < d; ++j) sum += (static_cast<double>(x[j]) - c[j]) * (static_cast<double>(x[j]) - c[j]);
  return sum;
}

/// Squared distance, in double, of each row to the nearest centroid; `indices`, if given, receives the centroids'
/// indices.
std::vector<double> nearest_distances(const std::vector<float>& rows, const std::vector<float>& centroids, int dim,
                                      std::vector<std::int32_t>* indices = nullptr) {
  const auto d = static_cast<std::size_t>(dim);
  std::vector<double> distances(rows.size() / d, HUGE_VAL);
  if (indices) indices->assign(distances.size(), 0);
  for (std::size_t t = 0; t < distances.size(); ++t)
    for (std::size_t k = 0; k < centroids.size() / d; ++k) {
      const double distance = distance_of(&rows[t * d], &centroids[k * d], d);
      if (!(distance < distances[t])) continue;
      distances[t] = distance;
      if (indices) (*indices)[t] = static_cast<std::int32_t>(k);
    }
  return distances;
}

std::vector<std::int32_t> naive_nearest(const std::vector<float>& rows, const std::vector<float>& centroids, int dim) {
  std::vector<std::int32_t> indices;
  nearest_distances(rows, centroids, dim, &indices);
  return indices;
}

double sum_of(const std::vector<double>& numbers) { return std::accumulate(numbers.begin(), numbers.end(), 0.0); }

/// `clusters` clouds of `each` rows around corners of a cube with edge 60, so far apart that seeding finds all of them.
/// Row t belongs to cloud t % clusters.
std::vector<float> clouds(int clusters, int each, int dim, std::uint64_t seed, float offset = 0.0f) {
  std::vector<float> rows = test::gaussian(static_cast<std::size_t>(clusters * each * dim), seed);
  for (int t = 0; t < clusters * each; ++t)
    for (int j = 0; j < dim; ++j)
      rows[static_cast<std::size_t>(t * dim + j)] += offset + (((t % clusters) >> j) & 1 ? 60.0f : 0.0f);
  return rows;
}

/// Whether clusters and clouds agree: two rows share a cluster exactly if they share a cloud.
bool is_the_clouds(const std::vector<std::int32_t>& assignment, int clusters) {
  std::set<std::int32_t> names(assignment.begin(), assignment.begin() + clusters);
  if (names.size() != static_cast<std::size_t>(clusters)) return false;
  for (std::size_t t = 0; t < assignment.size(); ++t)
    if (assignment[t] != assignment[t % static_cast<std::size_t>(clusters)]) return false;
  return true;
}

/// Checks properties that every result has.
void check_consistent(const KMeansResult& result, const std::vector<float>& rows, int dim, int clusters) {
  REQUIRE(result.centroids.size() == static_cast<std::size_t>(clusters * dim));
  CHECK(result.assignment == naive_nearest(rows, result.centroids, dim));
  CHECK(result.inertia == Approx(sum_of(nearest_distances(rows, result.centroids, dim))).epsilon(1e-12));
}

/// Inertia of greedy k-means++ seeds, by plain loops; with one trial, of k-means++.
double naive_seeds(const std::vector<float>& rows, int dim, int clusters, int trials, std::uint64_t seed) {
  test::Random random(seed);
  const auto d = static_cast<std::size_t>(dim);
  const int count = static_cast<int>(rows.size() / d);
  std::vector<double> closest(static_cast<std::size_t>(count), HUGE_VAL);
  for (int k = 0; k < clusters; ++k) {
    std::vector<double> best;
    for (int i = 0; i < (k == 0 ? 1 : trials); ++i) {
      std::size_t row = static_cast<std::size_t>(random.integer(0, count - 1));
      if (k > 0) {
        double left = random.uniform(0.0, sum_of(closest));
        for (row = 0; row + 1 < closest.size() && left >= closest[row]; ++row) left -= closest[row];
      }
      std::vector<double> distances(closest);
      for (std::size_t t = 0; t < distances.size(); ++t)
        distances[t] = std::min(distances[t], distance_of(&rows[t * d], &rows[row * d], d));
      if (best.empty() || sum_of(distances) < sum_of(best)) best = distances;
    }
    closest = best;
  }
  return sum_of(closest);
}

}  // namespace

TEST_CASE("The nearest centroid is that of a search in double, for odd sizes and any scale", "[compute]") {
  for (const int dim : {1, 3, 16, 61})
    for (const int clusters : {1, 2, 15, 16, 17, 33, 100, 300})
      for (const auto& [offset, scale] :
           {std::pair{0.0, 1.0}, {1000.0, 1.0}, {0.0, 1e-21}, {0.0, 1e-25}, {0.0, 1e18}, {0.0, 1e30}}) {
        const auto numbers = [&, o = offset, s = scale](int count, std::uint64_t seed) {
          std::vector<float> rows = test::gaussian(static_cast<std::size_t>(count * dim), seed);
          for (float& x : rows) x = static_cast<float>(s * (o + x));
          return rows;
        };
        const std::vector<float> rows = numbers(307, 1), centroids = numbers(clusters, 2);
        INFO("dim " << dim << ", " << clusters << " clusters, offset " << offset << ", scale " << scale);
        CHECK(nearest_centroids(rows, centroids, dim) == naive_nearest(rows, centroids, dim));
      }
}

TEST_CASE("Centroids that differ by less than a float product can tell are told apart", "[compute]") {
  constexpr int kDim = 64, kClusters = 40;
  const std::vector<float> base = test::gaussian(kDim, 1), steps = test::gaussian(kDim * kClusters, 2, 3e-7);
  std::vector<float> centroids;  // two groups, whose common mean is in neither
  for (std::size_t i = 0; i < steps.size(); ++i)
    centroids.push_back(((i / kDim) % 2 == 0 ? 1.0f : -1.0f) * base[i % kDim] + steps[i]);
  for (const double scale : {1e-6, 1.0, 1e4}) {
    const std::vector<float> rows = test::gaussian(kDim * 500, 3, scale);
    INFO("rows of scale " << scale);
    CHECK(nearest_centroids(rows, centroids, kDim) == naive_nearest(rows, centroids, kDim));
  }
}

TEST_CASE("A product that overflows on the way decides nothing", "[compute]") {
  // 2e20 * 1e18 fits into a float, twice that does not; the product with the first centroid is 0 in total.
  const std::vector<float> row(4, 2e20f);
  const std::vector<float> centroids = {1e18f,  1e18f, -1e18f, -1e18f, -1e18f, -1e18f, 1e18f, 1e18f,
                                        -1e18f, 0,     0,      0,      1e18f,  0,      0,     0};
  CHECK(nearest_centroids(row, centroids, 4) == std::vector<std::int32_t>{3});
}

TEST_CASE("Of equally near centroids the lowest wins", "[compute]") {
  for (const int copies : {2, 3, 16, 40}) {  // the same two centroids over and over
    std::vector<float> centroids;
    for (int i = 0; i < copies; ++i)
      for (const float x : {3.0f, 0.1f, -0.7f, 0.3f}) centroids.push_back(x);
    CHECK(nearest_centroids(std::vector<float>{-0.6f, 0.2f, 2.5f, 0.2f}, centroids, 2) ==
          std::vector<std::int32_t>{1, 0});
  }
  // A tie halfway between centroids: exact in double before the mean of the centroids, 7/3, is subtracted, and inexact
  // after.
  CHECK(nearest_centroids(std::vector<float>{1.0f, 3.5f}, std::vector<float>{2.0f, 0.0f, 5.0f}, 1) ==
        std::vector<std::int32_t>{0, 0});
  CHECK(nearest_centroids(std::vector<float>{1.0f, 3.5f}, std::vector<float>{5.0f, 0.0f, 2.0f}, 1) ==
        std::vector<std::int32_t>{1, 0});
}

TEST_CASE("k-means never gets worse with more iterations, and more tolerance stops it earlier", "[compute]") {
  constexpr int kDim = 8, kClusters = 24;
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    const std::vector<float> rows = test::rows_with_outliers(1201, kDim, seed);
    double before = HUGE_VAL;
    for (int iterations = 0; iterations < 15; ++iterations) {
      const KMeansResult result =
          kmeans(rows, kDim, {.clusters = kClusters, .max_iterations = iterations, .tolerance = 0.0, .seed = seed});
      INFO("seed " << seed << ", " << iterations << " iterations");
      check_consistent(result, rows, kDim, kClusters);
      CHECK(result.iterations <= iterations);
      CHECK(result.inertia <= before * (1.0 + 1e-7));  // centroids are rounded to float
      if (iterations == 1 || iterations == 2) CHECK(result.inertia < before * 0.999);
      before = result.inertia;
    }
    int last = 1000;
    for (const double tolerance : {0.0, 1e-3, 1e-1, 10.0, 1e9}) {
      const int used =
          kmeans(rows, kDim, {.clusters = kClusters, .max_iterations = 1000, .tolerance = tolerance, .seed = seed})
              .iterations;
      CHECK(used <= last);
      last = used;
    }
    CHECK(last == 1);
  }
}

TEST_CASE("Converged centroids are the means of their rows", "[compute]") {
  constexpr int kDim = 5, kClusters = 13;
  const std::vector<float> rows =
      test::gaussian(kDim * 3001, 4);  // pieces of more than one cluster are summed in parts
  for (const int clusters : {kClusters, 2}) {
    const KMeansResult result = kmeans(rows, kDim, {.clusters = clusters, .max_iterations = 1000, .tolerance = 0.0});
    REQUIRE(result.iterations < 1000);
    std::vector<double> sums(result.centroids.size(), 0.0), sizes(static_cast<std::size_t>(clusters), 0.0);
    for (std::size_t t = 0; t < result.assignment.size(); ++t) {
      const auto k = static_cast<std::size_t>(result.assignment[t]);
      sizes[k] += 1.0;
      for (std::size_t j = 0; j < kDim; ++j) sums[k * kDim + j] += static_cast<double>(rows[t * kDim + j]);
    }
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] /= sizes[i / kDim];
    CHECK(test::largest_difference(result.centroids, sums) < 2e-7);
  }
}

TEST_CASE("k-means has the same bytes for any number of threads", "[compute]") {
  constexpr int kDim = 13;
  const std::vector<float> rows = test::rows_with_outliers(5003, kDim, 7);
  const auto with_threads = [&](int threads) {
    const ThreadLimit limit(threads);
    return kmeans(rows, kDim, {.clusters = 37, .max_iterations = 9, .restarts = 2, .seed = 3, .layer = 1, .head = 2});
  };
  const KMeansResult one = with_threads(1);
  for (const int threads : {1, 2, 3, 0}) {
    const KMeansResult many = with_threads(threads);
    CHECK(test::first_bit_difference(many.centroids, one.centroids) == "");
    CHECK(many.assignment == one.assignment);
    CHECK(many.inertia == one.inertia);
    CHECK(many.iterations == one.iterations);
  }
}

TEST_CASE("Seed, layer and head each choose other random numbers", "[compute]") {
  const std::vector<float> rows = test::gaussian(4 * 500, 1);
  const auto seeds = [&](std::uint64_t seed, int layer, int head) {
    return kmeans(rows, 4, {.clusters = 9, .max_iterations = 0, .seed = seed, .layer = layer, .head = head}).centroids;
  };
  CHECK(std::set<std::vector<float>>{seeds(0, 0, 0), seeds(1, 0, 0), seeds(0, 1, 0), seeds(0, 0, 1)}.size() == 4);
}

TEST_CASE("Separated clouds are recovered, far from zero too", "[compute]") {
  constexpr int kDim = 6, kClusters = 23;
  for (const float offset : {0.0f, 1000.0f, 1e5f})
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const std::vector<float> rows = clouds(kClusters, 31, kDim, seed, offset);
      INFO("offset " << offset << ", seed " << seed);
      CHECK(is_the_clouds(kmeans(rows, kDim, {.clusters = kClusters, .seed = seed}).assignment, kClusters));
      CHECK(is_the_clouds(kmeans(rows, kDim, {.clusters = kClusters, .max_iterations = 0, .seed = seed}).assignment,
                          kClusters));
    }
}

TEST_CASE("Small clouds are seeded too when the rows are far apart as a whole", "[compute]") {
  constexpr int kDim = 6, kClusters = 20;
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    std::vector<float> rows = clouds(kClusters, 31, kDim, seed);
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = (i / kDim % 2 == 0 ? 3000.0f : -3000.0f) + rows[i] / 500.0f;
    INFO("seed " << seed);
    CHECK(is_the_clouds(kmeans(rows, kDim, {.clusters = kClusters, .max_iterations = 0, .seed = seed}).assignment,
                        kClusters));
  }
}

TEST_CASE("An offset that floats can hold changes nothing but the place", "[compute]") {
  constexpr int kDim = 12, kClusters = 20;
  std::vector<float> rows = test::gaussian(kDim * 900, 2), moved;
  for (float& x : rows) x = std::round(x * 256.0f) / 256.0f;  // 4096 + x is exact
  for (const float x : rows) moved.push_back(4096.0f + x);
  const KMeansOptions options{.clusters = kClusters, .max_iterations = 0, .seed = 5};
  const KMeansResult here = kmeans(rows, kDim, options), there = kmeans(moved, kDim, options);
  std::vector<float> back;
  for (const float c : there.centroids) back.push_back(c - 4096.0f);
  CHECK(back == here.centroids);
  CHECK(there.assignment == here.assignment);
  CHECK(there.inertia == here.inertia);
}

TEST_CASE("One cluster is the mean", "[compute]") {
  constexpr int kDim = 7;
  const std::vector<float> rows = test::rows_with_outliers(2503, kDim, 3);
  std::vector<double> mean(kDim, 0.0);
  for (std::size_t i = 0; i < rows.size(); ++i) mean[i % kDim] += static_cast<double>(rows[i]) / 2503.0;
  const KMeansResult result = kmeans(rows, kDim, {.clusters = 1});
  CHECK(test::relative_difference(result.centroids, mean) < 1e-7);
  CHECK(result.assignment == std::vector<std::int32_t>(2503, 0));
  check_consistent(result, rows, kDim, 1);
}

TEST_CASE("As many clusters as rows leave no inertia", "[compute]") {
  for (const int count : {1, 2, 17, 200})
    for (const float offset : {0.0f, 1000.0f}) {
      std::vector<float> rows = test::gaussian(static_cast<std::size_t>(count) * 5, 9);
      for (float& x : rows) x += offset;
      const KMeansResult result = kmeans(rows, 5, {.clusters = count});
      INFO(count << " rows, offset " << offset);
      CHECK(result.inertia == 0.0);
      CHECK(std::set<std::int32_t>(result.assignment.begin(), result.assignment.end()).size() ==
            static_cast<std::size_t>(count));
    }
}

TEST_CASE("Fewer distinct rows than clusters leave clusters empty, without inertia", "[compute]") {
  constexpr int kDim = 9;
  for (const std::size_t distinct : {1u, 3u})
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      const std::vector<float> values = test::gaussian(kDim * distinct, seed, 50.0);
      std::vector<float> rows;
      for (int copy = 0; copy < 170; ++copy) rows.insert(rows.end(), values.begin(), values.end());
      const KMeansResult result = kmeans(rows, kDim, {.clusters = 20, .seed = seed});
      INFO(distinct << " distinct rows, seed " << seed);
      check_consistent(result, rows, kDim, 20);
      CHECK(result.inertia == 0.0);
      CHECK(result.repaired == 0);
      for (std::size_t t = distinct; t < result.assignment.size(); ++t)
        CHECK(result.assignment[t] == result.assignment[t - distinct]);
    }
}

TEST_CASE("A cluster without rows is given the farthest one", "[compute]") {
  // Rows so small that their squares underflow: seeding finds only distances of 0 and draws rows at random, some of
  // them twice.
  constexpr int kDim = 2, kClusters = 12;
  int repaired = 0;
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    const std::vector<float> rows = test::gaussian(kDim * 30, seed, 1e-25);
    const auto after = [&](int iterations) {
      return kmeans(rows, kDim, {.clusters = kClusters, .max_iterations = iterations, .tolerance = 0.0, .seed = seed});
    };
    const KMeansResult seeds = after(0), first = after(1), last = after(100);
    INFO("seed " << seed);
    const std::set<std::int32_t> used(seeds.assignment.begin(), seeds.assignment.end());
    const int empty = kClusters - static_cast<int>(used.size());
    CHECK(first.repaired == empty);
    CHECK(last.repaired >= empty);
    CHECK(std::set<std::int32_t>(last.assignment.begin(), last.assignment.end()).size() == kClusters);
    check_consistent(last, rows, kDim, kClusters);
    if (empty == 0) continue;

    // The row farthest from its seed has moved to the first empty cluster. It is alone there, so it is the centroid.
    const std::vector<double> distances = nearest_distances(rows, seeds.centroids, kDim);
    const auto farthest =
        static_cast<std::size_t>(std::max_element(distances.begin(), distances.end()) - distances.begin());
    std::int32_t first_empty = 0;
    while (used.count(first_empty)) ++first_empty;
    for (std::size_t j = 0; j < kDim; ++j)
      CHECK(first.centroids[static_cast<std::size_t>(first_empty) * kDim + j] == rows[farthest * kDim + j]);
    CHECK(first.inertia < seeds.inertia);
    repaired += empty;
  }
  CHECK(repaired > 5);
}

TEST_CASE("Of several restarts the best one counts", "[compute]") {
  const std::vector<float> rows = test::gaussian(4 * 400, 8);
  int improved = 0;
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    const auto best_of = [&](int restarts) {
      return kmeans(rows, 4, {.clusters = 16, .restarts = restarts, .seed = seed});
    };
    double before = best_of(1).inertia;
    for (int restarts = 2; restarts <= 4; ++restarts) {
      const KMeansResult result = best_of(restarts);
      check_consistent(result, rows, 4, 16);
      CHECK(result.inertia <= before);
      improved += result.inertia < before ? 1 : 0;
      before = result.inertia;
    }
  }
  CHECK(improved >= 4);
}

TEST_CASE("Seeds are as good as those of greedy k-means++, and better than those of k-means++", "[compute]") {
  constexpr int kDim = 3, kClusters = 30, kTrials = 5, kRuns = 40;
  const std::vector<float> rows = test::gaussian(kDim * 400, 5);
  double ours = 0.0, greedy = 0.0, plain = 0.0;
  for (std::uint64_t seed = 0; seed < kRuns; ++seed) {
    ours += kmeans(rows, kDim, {.clusters = kClusters, .max_iterations = 0, .seed = seed}).inertia;
    greedy += naive_seeds(rows, kDim, kClusters, kTrials, seed);
    plain += naive_seeds(rows, kDim, kClusters, 1, seed);
  }
  INFO("ours " << ours / kRuns << ", greedy " << greedy / kRuns << ", k-means++ " << plain / kRuns);
  CHECK(ours == Approx(greedy).epsilon(0.03));
  CHECK(ours < 0.9 * plain);
}

TEST_CASE("Options out of range and rows that are not finite are errors in words", "[compute]") {
  const std::vector<float> rows = test::gaussian(2 * 5000, 1);
  const auto text = [&](const KMeansOptions& options) { return test::error_text([&] { kmeans(rows, 2, options); }); };
  for (const int clusters : {0, -3, 4097}) {
    INFO(clusters);
    CHECK_THAT(text({.clusters = clusters}), StartsWith("usage: k-means: expected 1 to 4096 clusters") &&
                                                 Contains(fmt::format("found {} clusters for 5000 rows", clusters)));
  }
  CHECK_THAT(test::error_text([&] { kmeans(std::span(rows).first(20), 2, {.clusters = 11}); }),
             StartsWith("usage: ") && Contains("found 11 clusters for 10 rows"));
  CHECK_THAT(test::error_text([&] { kmeans({}, 2, {.clusters = 1}); }),
             StartsWith("usage: ") && Contains("found 1 clusters for 0 rows"));
  CHECK_THAT(text({.restarts = 0}), StartsWith("usage: ") && Contains("found 0"));
  CHECK_THAT(text({.max_iterations = -1}), StartsWith("usage: ") && Contains("found -1"));
  CHECK_THAT(text({.tolerance = -1.0}), StartsWith("usage: ") && Contains("found -1"));
  CHECK_THAT(text({.tolerance = std::numeric_limits<double>::quiet_NaN()}), StartsWith("usage: "));
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> broken(rows);
    broken[777] = bad;
    CHECK_THAT(test::error_text([&] { kmeans(broken, 2, {.clusters = 3}); }), StartsWith("numerical: "));
  }
  CHECK(kmeans(rows, 2, {.clusters = 4096, .max_iterations = 1}).centroids.size() == 2 * 4096);
}
