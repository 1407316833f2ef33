#include <kvq/compute/cuda_library.h>
#include <kvq/solve/trellis_tables.h>
#include <kvq/stats/collect.h>

#include "support/dump_writer.h"
#include "support/layers.h"
#include "support/matrix.h"
#include "support/random_data.h"

#include <fmt/format.h>
#include <catch2/catch.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

// Not tests, but the times of docs/measurements.md: kvq-test-cuda "[.timing]".

namespace kvq::test {

namespace {

/// Milliseconds of a call: the median of some, or the least, after one that loads libraries.
template <typename F>
double milliseconds(F f, bool least = false) {
  f();
  std::vector<double> times;
  for (int i = 0; i < 7; ++i) {
    const auto start = std::chrono::steady_clock::now();
    f();
    times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  return least ? times.front() : times[times.size() / 2];
}

/// A layer of Qwen3-8B's size.
LayerActivations qwen_layer() {
  LayerSpec spec{.num_q_heads = 32, .num_kv_heads = 8, .head_dim = 128, .v_head_dim = 128, .lengths = {8878}};
  spec.dtype = DType::bf16;
  spec.softmax_scale = 1.0 / std::sqrt(128.0);
  return make_layer(spec);
}

}  // namespace

TEST_CASE("Times of statistics and eigenvectors", "[.timing]") {
  const int device = 0;
  const auto backend = CudaLibrary().make_backend(std::span(&device, 1));
  fmt::print("{}\n", backend->name());
  std::vector<double> batch;
  for (std::uint64_t i = 0; i < 576; ++i) {
    const std::vector<double> one = random_covariance(128, i % 16 + 1);
    batch.insert(batch.end(), one.begin(), one.end());
  }
  fmt::print("576 eigendecompositions of 128 x 128: {:.1f} ms\n", milliseconds([&] { backend->eigh(batch, 128); }));
  constexpr std::size_t kSize = 128 * 128;
  const auto all = backend->eigh(batch, 128);
  for (const std::size_t count : {1, 2, 3, 5, 8, 16, 64, 288, 500}) {
    const auto some = backend->eigh(std::span(batch).first(count * kSize), 128);
    std::size_t different = 0;
    for (std::size_t i = 0; i < count; ++i) different += some[i].vectors != all[i].vectors ? 1 : 0;
    fmt::print("of the first {}: {} differ from the batch of 576\n", count, different);
  }
  const LayerActivations layer = qwen_layer();
  const LayerGeometry& g = layer.geometry;
  fmt::print("second moments of queries: {:.1f} ms\n",
             milliseconds([&] { backend->second_moments(layer.q.view(), {.heads_per_group = 4}); }));
  fmt::print("second moments of keys: {:.1f} ms\n", milliseconds([&] { backend->second_moments(layer.k.view(), {}); }));
  const SequenceAttention sequence{
      .geometry = g, .q = layer.q.view(), .k = layer.k.view(), .v = layer.v->view(), .first = 0, .count = 8878};
  for (const bool scored : {false, true})
    fmt::print("attention moments{}: {:.1f} ms\n", scored ? " with scored queries" : "", milliseconds([&] {
                 std::vector<AttentionMoments> moments(8, {MomentSum{128}, MomentSum{128}, {}});
                 backend->add_attention_moments(sequence, scored, moments, {});
               }));
}

TEST_CASE("The statistics of OSCAR for one layer, once: for a profiler, which adds up the times of kernels",
          "[.layer]") {
  const int device = 0;
  const auto backend = CudaLibrary().make_backend(std::span(&device, 1));
  const LayerActivations layer = qwen_layer();
  collect(layer, {.moments = {Moment::query, Moment::key, Moment::value, Moment::scored_value}}, *backend);
}

TEST_CASE("Times of quantization", "[.timing]") {
  const int device = 0, dim = 128;
  const auto backend = CudaLibrary().make_backend(std::span(&device, 1));
  const RotatedData data{.dim = dim, .rows = gaussian(std::size_t{65536} * dim, 1)};
  const auto time_of = [&](const char* what, const RowCodec& codec) {
    const auto milliseconds_of = [&](std::size_t count) {
      const std::vector<CodingTask> tasks(count, CodingTask{&data, &codec});
      return milliseconds([&] { backend->coding_costs(tasks); }, true);
    };
    fmt::print("{}, 65536 rows of 128: {:.2f} ms\n", what, (milliseconds_of(17) - milliseconds_of(1)) / 16);
  };
  time_of("INT2, one group, clipped", RowCodec(UniformCoder{.bits = 2, .group_size = dim}, 0.95, dim));
  for (const int bits : {2, 3, 4}) {
    TensorPlan plan;
    plan.coder = TrellisCoder{.bits = bits, .group_size = dim, .taps = trellis_taps(bits, 3, dim)};
    time_of(fmt::format("trellis of {} bits", bits).c_str(), RowCodec(plan, 0, dim));
  }
}

TEST_CASE("Times of k-means", "[.timing]") {
  const int device = 0, dim = 128;
  const auto backend = CudaLibrary().make_backend(std::span(&device, 1));
  const std::size_t count = 20000;
  std::vector<std::vector<float>> rows;
  for (std::uint64_t i = 0; i < 16; ++i) rows.push_back(gaussian(count * dim, i));
  for (const int clusters : {256, 2048}) {
    const auto time_of = [&](int iterations) {
      std::vector<ClusterTask> tasks;
      for (const std::vector<float>& one : rows)
        tasks.push_back({one, dim, {.clusters = clusters, .max_iterations = iterations, .tolerance = 0.0}});
      return milliseconds([&] { backend->kmeans(tasks); }, true);
    };
    const double seeds = time_of(0), all = time_of(25);
    fmt::print("k-means, 16 x 20000 x 128, C = {}: {:.1f} ms for 25 iterations, {:.1f} ms before and after\n", clusters,
               all - seeds, seeds);
  }
  std::vector<float> numbers = gaussian(std::size_t{1} << 22, 3);
  fmt::print("sort of 4 Mi numbers: {:.1f} ms\n", milliseconds([&] { backend->sorted(numbers); }));
}

TEST_CASE("A dump of the size of Qwen3-8B's, qwen3-8b.h5 in this folder", "[.dump]") {
  RandomDumpSpec spec{.num_q_heads = 32, .num_kv_heads = 8, .head_dim = 128, .v_head_dim = 128, .lengths = {8878}};
  spec.dtype = DType::bf16;
  spec.rope = {.layout = RopeLayout::half, .dim = 128, .inv_freq = {}};
  for (int i = 0; i < 64; ++i) spec.rope.inv_freq.push_back(std::pow(1e6, -i / 64.0));
  DumpContent dump = random_dump(spec);
  dump.num_layers = 36;
  while (dump.layers.size() < 36) {
    dump.layers.push_back(dump.layers.front());
    dump.layers.back().layer = static_cast<int>(dump.layers.size()) - 1;
  }
  write_dump("qwen3-8b.h5", dump);
}

}  // namespace kvq::test
