#include <kvq/compute/cuda_library.h>

#include "cuda/layer_moments.h"
#include "support/backend_conformance.h"
#include "support/compare.h"
#include "support/layers.h"
#include "support/matrix.h"

#include <catch2/catch.hpp>

#include <numeric>

namespace kvq::test {

namespace {

std::unique_ptr<Backend> backend_of(int devices) {
  std::vector<int> numbers(static_cast<std::size_t>(devices));
  std::iota(numbers.begin(), numbers.end(), 0);
  return CudaLibrary().make_backend(numbers);
}

std::vector<AttentionMoments> symmetric_moments(Backend& backend, const LayerActivations& layer) {
  std::vector<AttentionMoments> moments = attention_moments(backend, layer);
  for (AttentionMoments& head : moments) head.outputs.symmetrize(), head.scored_query.symmetrize();
  return moments;
}

LayerActivations long_layer(DType type, int head_dim, int window, std::int64_t tokens = 5003) {
  return make_layer({.num_q_heads = 6,
                     .num_kv_heads = 3,
                     .head_dim = head_dim,
                     .v_head_dim = head_dim - 8,
                     .lengths = {tokens},
                     .dtype = type,
                     .sliding_window = window,
                     .softmax_scale = 0.2,
                     .seed = 8});
}

}  // namespace

TEST_CASE("The CUDA backend keeps the bounds of all backends") {
  const auto backend = backend_of(1);
  check_conformance(*backend);
}

TEST_CASE("Long sequences: a CUDA device gives the moments of processors, and the same bytes again") {
  const auto backend = backend_of(1);
  for (const DType type : {DType::bf16, DType::f16, DType::f32})
    for (const int head_dim : {64, 128, 256})
      for (const int window : {0, 700}) {
        INFO(activation_name(type) << ", head_dim " << head_dim << ", window " << window);
        const LayerActivations layer = long_layer(type, head_dim, window);
        const auto found = symmetric_moments(*backend, layer), again = symmetric_moments(*backend, layer),
                   expected = symmetric_moments(cpu_backend(), layer);
        for (std::size_t h = 0; h < found.size(); ++h) {
          CHECK(relative_difference(found[h].outputs.sum, expected[h].outputs.sum) < 5e-6);
          CHECK(relative_difference(found[h].outputs.mean, expected[h].outputs.mean) < 5e-6);
          CHECK(relative_difference(found[h].column_energy, expected[h].column_energy) < 5e-6);
          CHECK(relative_difference(found[h].scored_query.sum, expected[h].scored_query.sum) < 5e-6);
          CHECK(found[h].outputs.sum == again[h].outputs.sum);
          CHECK(found[h].scored_query.sum == again[h].scored_query.sum);
          CHECK(found[h].column_energy == again[h].column_energy);
        }
      }
}

TEST_CASE("A sequence of 131072 tokens: a CUDA device gives the moments of processors") {
  const auto backend = backend_of(1);
  const LayerActivations layer = long_layer(DType::bf16, 128, 300, 131072);  // a window, for the processors' sake
  const auto found = symmetric_moments(*backend, layer), expected = symmetric_moments(cpu_backend(), layer);
  for (std::size_t h = 0; h < found.size(); ++h) {
    CHECK(relative_difference(found[h].outputs.sum, expected[h].outputs.sum) < 5e-6);
    CHECK(relative_difference(found[h].column_energy, expected[h].column_energy) < 5e-6);
    CHECK(relative_difference(found[h].scored_query.sum, expected[h].scored_query.sum) < 5e-6);
  }
  // Without a window: the same bytes again, and energies in their range.
  const LayerActivations causal = long_layer(DType::bf16, 128, 0, 131072);
  const auto all = symmetric_moments(*backend, causal), again = symmetric_moments(*backend, causal);
  for (std::size_t h = 0; h < all.size(); ++h) {
    CHECK(all[h].outputs.sum == again[h].outputs.sum);
    CHECK(all[h].column_energy == again[h].column_energy);
    double energy = 0.0;
    for (const double column : all[h].column_energy) energy += column;
    CHECK(energy > 0.0);
    CHECK(energy < 2.0 * 131072);  // two query heads, and no row's squared weights exceed 1
  }
}

TEST_CASE("Several CUDA devices give the bytes of one") {
  const int devices = CudaLibrary().num_devices();
  if (devices < 2) WARN("one device here: its backend is compared with another one of the same device");
  const auto one = backend_of(1), all = backend_of(devices);
  const LayerActivations layer = long_layer(DType::bf16, 128, 0);
  const auto of_one = symmetric_moments(*one, layer), of_all = symmetric_moments(*all, layer);
  const auto queries_of_one = one->second_moments(layer.q.view(), {.heads_per_group = 2}),
             queries_of_all = all->second_moments(layer.q.view(), {.heads_per_group = 2});
  for (std::size_t h = 0; h < of_one.size(); ++h) {
    CHECK(of_one[h].outputs.sum == of_all[h].outputs.sum);
    CHECK(of_one[h].scored_query.sum == of_all[h].scored_query.sum);
    CHECK(of_one[h].column_energy == of_all[h].column_energy);
    CHECK(queries_of_one[h].sum == queries_of_all[h].sum);
  }
  const std::vector<double> matrix = random_covariance(96, 3);
  for (int i = 0; i < 2 * devices; ++i)  // devices take turns
    CHECK(all->eigh(matrix, 96).front().vectors == one->eigh(matrix, 96).front().vectors);
}

}  // namespace kvq::test
