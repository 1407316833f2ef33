#include <kvq/compute/kmeans.h>
#include <kvq/compute/parallel.h>

#include <fmt/core.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <fstream>
#include <string>
#include <vector>

// Times kmeans() on a raw float32 file and prints one JSON object; scripts/experiments/bench_kmeans.py makes the file
// and compares. Seeding is a run of 0 iterations (it ends with one more assignment and the inertia); Lloyd is what the
// full run takes longer.

namespace {

std::vector<float> read_floats(const char* path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::vector<float> numbers(file ? static_cast<std::size_t>(file.tellg()) / sizeof(float) : 0);
  file.seekg(0);
  file.read(reinterpret_cast<char*>(numbers.data()), static_cast<std::streamsize>(numbers.size() * sizeof(float)));
  return numbers;
}

struct Seconds {
  double wall = 0.0, cpu = 0.0;  ///< cpu: of all threads
};

Seconds timed(const std::vector<float>& rows, int dim, const kvq::KMeansOptions& options, kvq::KMeansResult& result) {
  const auto start = std::chrono::steady_clock::now();
  const std::clock_t cpu_start = std::clock();
  result = kvq::kmeans(rows, dim, options);
  return {std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
          static_cast<double>(std::clock() - cpu_start) / CLOCKS_PER_SEC};
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 7) {
    fmt::print(stderr, "usage: bench_kmeans FILE DIM CLUSTERS ITERATIONS SEED THREADS\n");
    return 2;
  }
  const std::vector<float> rows = read_floats(argv[1]);
  const int dim = std::atoi(argv[2]);
  const kvq::KMeansOptions full{
      .clusters = std::atoi(argv[3]),
      .max_iterations = std::atoi(argv[4]),
      .tolerance = 0.0,
      .seed = std::strtoull(argv[5], nullptr, 10),
  };
  kvq::KMeansOptions seeds = full;
  seeds.max_iterations = 0;
  const kvq::ThreadLimit limit(std::atoi(argv[6]));

  kvq::KMeansResult result;
  timed(rows, dim, {.clusters = 1}, result);  // starts the threads and reads the data once
  const Seconds seeding = timed(rows, dim, seeds, result), total = timed(rows, dim, full, result);
  fmt::print(
      "{{\"seeding\": {:.4f}, \"seeding_cpu\": {:.4f}, \"lloyd\": {:.4f}, \"lloyd_cpu\": {:.4f}, \"iterations\": {}, "
      "\"inertia\": {}}}\n",
      seeding.wall, seeding.cpu, total.wall - seeding.wall, total.cpu - seeding.cpu, result.iterations, result.inertia);
  return 0;
} catch (const std::exception& error) {
  fmt::print(stderr, "bench_kmeans: error: {}\n", error.what());
  return 1;
}
