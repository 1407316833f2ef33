#include <kvq/compute/cuda_library.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace kvq::test {

namespace {

std::unique_ptr<Backend> first_device() {
  const int device = 0;
  return CudaLibrary().make_backend(std::span(&device, 1));
}

/// Rows around some points, with channels of different size.
std::vector<float> clouds(std::size_t count, int dim, std::uint64_t seed, int points, float spread) {
  const auto d = static_cast<std::size_t>(dim);
  std::vector<float> rows = gaussian(count * d, seed, spread);
  const std::vector<float> middles = gaussian(static_cast<std::size_t>(points) * d, seed + 1);
  for (std::size_t t = 0; t < count; ++t)
    for (std::size_t j = 0; j < d; ++j) {
      float& x = rows[t * d + j];
      x += middles[t * 7 % static_cast<std::size_t>(points) * d + j];
      x = x * (j % 50 == 3 ? 40.0f : 1.0f) + (j % 50 == 3 ? 300.0f : 0.0f);
    }
  return rows;
}

KMeansResult on(Backend& backend, const ClusterTask& task) { return backend.kmeans(std::span(&task, 1)).front(); }

/// Compares without printing numbers, of which there are many.
template <typename T>
bool equal(const std::vector<T>& a, const std::vector<T>& b) {
  return a == b;
}

void check_equal(const KMeansResult& found, const KMeansResult& expected) {
  CHECK(found.iterations == expected.iterations);
  CHECK(found.repaired == expected.repaired);
  CHECK(equal(found.assignment, expected.assignment));
  CHECK(equal(found.centroids, expected.centroids));
  CHECK(found.inertia == Approx(expected.inertia).epsilon(1e-12));
}

/// The device's seeding sums distances in another order, so with many clusters some seed is another row.
void check_as_good(const ClusterTask& task, const KMeansResult& found, const KMeansResult& expected) {
  CHECK(equal(found.assignment, nearest_centroids(task.rows, found.centroids, task.dim)));
  CHECK(found.inertia == Approx(expected.inertia).epsilon(0.02));
}

struct Shape {
  std::size_t count;
  int dim, clusters, restarts, points;
};

}  // namespace

TEST_CASE("k-means on a CUDA device gives the bytes of processors") {
  const auto backend = first_device();
  for (const Shape& shape : {Shape{3000, 128, 16, 1, 40}, Shape{5000, 128, 256, 2, 700}, Shape{4100, 64, 4096, 1, 4000},
                             Shape{2500, 200, 33, 1, 60}, Shape{1500, 300, 100, 3, 30}, Shape{900, 1024, 40, 1, 50},
                             Shape{6000, 1, 16, 2, 100}, Shape{700, 20, 1, 1, 9}, Shape{257, 7, 257, 1, 300}})
    for (const float spread : {0.1f, 1.0f}) {
      INFO(shape.count << " rows of " << shape.dim << ", " << shape.clusters << " clusters, spread " << spread);
      std::vector<std::vector<float>> rows;
      std::vector<ClusterTask> tasks;
      for (std::uint64_t i = 0; i < 3; ++i)
        rows.push_back(clouds(shape.count, shape.dim, 10 * i + shape.count, shape.points, spread));
      for (int i = 0; i < 3; ++i)
        tasks.push_back({rows[static_cast<std::size_t>(i)],
                         shape.dim,
                         {.clusters = shape.clusters, .restarts = shape.restarts, .seed = 4, .head = i}});
      const auto found = backend->kmeans(tasks), again = backend->kmeans(tasks), expected = cpu_backend().kmeans(tasks);
      REQUIRE(found.size() == tasks.size());
      for (std::size_t i = 0; i < tasks.size(); ++i) {
        if (shape.clusters <= 256)
          check_equal(found[i], expected[i]);
        else
          check_as_good(tasks[i], found[i], expected[i]);
        check_equal(again[i], found[i]);
        CHECK(equal(on(*backend, tasks[i]).centroids, found[i].centroids));
      }
    }
}

TEST_CASE("k-means on a CUDA device: equal rows, ties and empty clusters") {
  const auto backend = first_device();
  const auto both = [&](const std::vector<float>& rows, int dim, const KMeansOptions& options) {
    INFO(rows.size() << " numbers, " << options.clusters << " clusters, seed " << options.seed);
    const ClusterTask task{rows, dim, options};
    check_equal(on(*backend, task), on(cpu_backend(), task));
  };
  std::vector<float> few = gaussian(std::size_t{11} * 32, 5);  // 11 rows, many times
  while (few.size() < std::size_t{2000} * 32) few.insert(few.end(), few.begin(), few.begin() + 11 * 32);
  both(few, 32, {.clusters = 40});
  both(std::vector<float>(std::size_t{600} * 16, 2.5f), 16, {.clusters = 5});
  std::vector<float> grid;  // rows between centroids, at equal distances
  for (int i = 0; i < 900; ++i)
    for (const int x : {i % 30, i / 30}) grid.push_back(static_cast<float>(x));
  for (const int clusters : {4, 9, 100, 900}) both(grid, 2, {.clusters = clusters, .tolerance = 0.0});
  // Clusters that lose their rows: far rows, of which there are few.
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<float> rows = gaussian(400, seed);
    for (std::size_t t = 0; t < rows.size(); t += 37) rows[t] *= 50.0f;
    both(rows, 2, {.clusters = 120, .tolerance = 0.0, .seed = seed});
  }
}

TEST_CASE("k-means on a CUDA device: numbers of extreme size, and what is no number") {
  const auto backend = first_device();
  // Squares of processors are zero or infinite here, so their seeds differ.
  for (const float size : {1e-38f, 1e-25f, 1e25f, 1e37f}) {
    INFO(size);
    std::vector<float> rows = gaussian(std::size_t{800} * 24, 9);
    for (float& x : rows) x *= size;
    const ClusterTask task{rows, 24, {.clusters = 12}};
    check_as_good(task, on(*backend, task), on(cpu_backend(), task));
  }
  for (const float broken : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> rows = gaussian(800, 9);
    rows[123] = broken;
    const ClusterTask task{rows, 8, {.clusters = 12}};
    CHECK_THAT(error_text([&] { on(*backend, task); }), Catch::Matchers::StartsWith("numerical: "));
  }
  CHECK(backend->kmeans({}).empty());
}

TEST_CASE("A CUDA device sorts as processors do") {
  const auto backend = first_device();
  for (const std::size_t count : {0, 1, 2, 33, 100000, 3000001}) {
    std::vector<float> numbers = gaussian(count, count);
    for (std::size_t i = 0; i < count; i += 5) numbers[i] *= 1e-39f;
    CHECK(equal(backend->sorted(numbers), cpu_backend().sorted(numbers)));
  }
}

}  // namespace kvq::test
