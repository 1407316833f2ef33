#include <kvq/compute/cuda_library.h>
#include <kvq/compute/device_bytes.h>
#include <kvq/core/error.h>
#include <kvq/stats/collect.h>

#include "cuda/layer_moments.h"
#include "support/decide.h"
#include "support/layers.h"
#include "support/matrix.h"
#include "support/random_data.h"

#include <cuda_runtime.h>
#include <catch2/catch.hpp>

#include <string>
#include <thread>

namespace kvq::test {

namespace {

/// Room for one context, and for 170 MB of buffers.
constexpr std::int64_t kSmall = 925'000'000;

std::unique_ptr<Backend> backend_with(std::int64_t limit) {
  const int device = 0;
  return CudaLibrary().make_backend(std::span(&device, 1), limit);
}

std::int64_t free_bytes() {
  std::size_t free = 0, total = 0;
  REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
  return static_cast<std::int64_t>(free);
}

/// Calls f(backend) with a small limit and with none, and checks that the results are equal and the memory is kept.
/// @param divides  without a limit, f takes more than the small one has room for
template <typename F>
void check_same(F f, bool divides = true) {
  const auto ample = backend_with(0);
  const auto expected = f(*ample);
  const std::int64_t before = free_bytes();
  const auto small = backend_with(kSmall);
  CHECK(f(*small) == expected);
  const std::int64_t taken = before - free_bytes();
  CHECK(small->device_bytes() <= kSmall);
  CHECK(small->device_bytes() > cuda::bytes_beside(1));
  CHECK(taken <= kSmall);
  const std::int64_t beside = cuda::bytes_beside(cuda::kMostLanes);
  if (divides) CHECK(ample->device_bytes() - beside > kSmall - cuda::bytes_beside(1));
}

std::vector<double> all_numbers(const std::vector<MomentSum>& sums) {
  std::vector<double> all;
  for (const MomentSum& sum : sums) {
    all.insert(all.end(), sum.sum.begin(), sum.sum.end());
    all.insert(all.end(), sum.mean.begin(), sum.mean.end());
  }
  return all;
}

LayerActivations layer_of(std::int64_t tokens, int head_dim, DType type) {
  return make_layer({.num_q_heads = 8,
                     .num_kv_heads = 4,
                     .head_dim = head_dim,
                     .v_head_dim = head_dim,
                     .lengths = {tokens},
                     .dtype = type,
                     .softmax_scale = 0.1,
                     .seed = 5});
}

}  // namespace

TEST_CASE("Second moments and quadratic forms of long tensors have the same bytes in pieces") {
  // With the small limit there is room for groups of one head, and for pieces of larger groups.
  // More tokens than are in double at a time, and a last chunk that is not whole.
  const std::int64_t tokens = 2 * cuda::kTokensAtOnce + 1234;
  constexpr int kDim = 64;
  const LayerActivations layer = layer_of(tokens, kDim, DType::f32);
  std::vector<float> weights;
  for (std::int64_t t = 0; t < tokens; ++t) weights.push_back(0.25f + static_cast<float>(t % 7));
  check_same([&](Backend& backend) {
    std::vector<double> all = all_numbers(backend.second_moments(
        layer.q.view(), {.heads_per_group = 4, .skipped_first = cuda::kTokensAtOnce - 5, .skipped_count = 700}));
    MomentRequest of_tokens;
    of_tokens.weights = weights;
    for (const double x : all_numbers(backend.second_moments(layer.k.view(), of_tokens))) all.push_back(x);
    of_tokens.heads_per_group = 8;
    for (const double x : all_numbers(backend.second_moments(layer.q.view(), of_tokens))) all.push_back(x);
    std::vector<double> matrices;
    for (std::uint64_t h = 0; h < 4; ++h) {
      const std::vector<double> one = random_covariance(kDim, h + 1);
      matrices.insert(matrices.end(), one.begin(), one.end());
    }
    const std::vector<float> forms = backend.quadratic_forms(layer.k.view(), matrices, {});
    all.insert(all.end(), forms.begin(), forms.end());
    MomentRequest of_heads;
    of_heads.weights = forms;
    for (const int together : {1, 4}) {
      of_heads.heads_per_group = together;
      for (const double x : all_numbers(backend.second_moments(layer.v->view(), of_heads))) all.push_back(x);
    }
    return all;
  });
}

TEST_CASE("Attention moments have the same bytes in batches of heads") {
  for (const DType type : {DType::bf16, DType::f32}) {
    INFO(activation_name(type));
    const LayerActivations layer = layer_of(type == DType::bf16 ? 20011 : 9001, 128, type);
    check_same([&](Backend& backend) {
      std::vector<double> all;
      for (const AttentionMoments& head : attention_moments(backend, layer)) {
        for (const double x : all_numbers({head.outputs, head.scored_query})) all.push_back(x);
        all.insert(all.end(), head.column_energy.begin(), head.column_energy.end());
      }
      return all;
    });
  }
}

TEST_CASE("Eigenvectors and coding costs have the same bytes in batches") {
  constexpr int kDim = 128;
  std::vector<double> matrices;
  for (std::uint64_t i = 0; i < 400; ++i) {
    const std::vector<double> one = random_covariance(kDim, i % 16 + 1);
    matrices.insert(matrices.end(), one.begin(), one.end());
  }
  check_same([&](Backend& backend) {
    std::vector<double> all;
    for (const EigenPairs& pairs : backend.eigh(matrices, kDim))
      all.insert(all.end(), pairs.vectors.begin(), pairs.vectors.end());
    return all;
  });
  std::vector<RotatedData> rows;
  for (std::uint64_t i = 0; i < 4; ++i) rows.push_back({.dim = kDim, .rows = gaussian(4096 * kDim, i + 20)});
  std::vector<RowCodec> codecs;
  for (int i = 0; i < 30; ++i)
    codecs.emplace_back(UniformCoder{.bits = 2 + i % 3, .group_size = kDim}, 1.0 - 0.01 * i, kDim);
  std::vector<CodingTask> tasks;
  for (const RotatedData& data : rows)
    for (const RowCodec& codec : codecs) tasks.push_back({&data, &codec});
  check_same([&](Backend& backend) {
    std::vector<double> all = backend.clip_costs(tasks);
    for (const double cost : backend.coding_costs(tasks)) all.push_back(cost);
    for (const std::vector<double>& one : backend.error_covariances(std::span(tasks).first(70)))
      all.insert(all.end(), one.begin(), one.end());
    return all;
  });
}

TEST_CASE("Errors of outputs have the same bytes head by head, and after others took the memory") {
  constexpr int kDim = 128;
  constexpr std::int64_t kTokens = 900;
  std::vector<kvq::AttentionCase> heads;
  for (std::uint64_t h = 0; h < 8; ++h) {
    kvq::AttentionCase one{.dim = kDim, .v_dim = kDim, .queries_per_head = 4, .scale = 0.1};
    for (std::int64_t i = 0; i < kTokens; ++i) one.query.push_back(i);
    one.q = gaussian(4 * kTokens * kDim, 60 + h);
    one.k = gaussian(kTokens * kDim, 70 + h);
    one.v = gaussian(kTokens * kDim, 80 + h);
    heads.push_back(std::move(one));
  }
  std::vector<double> matrices;
  for (std::uint64_t i = 0; i < 100; ++i) {
    const std::vector<double> one = random_covariance(kDim, i % 16 + 1);
    matrices.insert(matrices.end(), one.begin(), one.end());
  }
  check_same([&](Backend& backend) {
    const auto judge = backend.judge_outputs(heads);
    std::vector<double> all{judge->energy().curved, judge->energy().squared};
    for (const int bits : {2, 4}) {
      TensorPlan plan;
      plan.coder = UniformCoder{.bits = bits, .group_size = 32};
      for (const Side side : kSides)
        for (const OutputChange& change : judge->changes(plan, side)) all.push_back(change.curved);
      all.push_back(backend.eigh(matrices, kDim).front().vectors.front());
    }
    return all;
  });
}

TEST_CASE("Decisions have the same bytes while threads share a small limit") {
  const LayerActivations layer = layer_of(3001, 64, DType::bf16);
  for (const char* name : {"oscar", "kvq"}) {
    INFO(name);
    const Options options = options_of(name, [](Options& o) { o.seed = 3; });
    const Method& method = find_method(name);
    check_same(
        [&](Backend& backend) {
          const StatsRequest request{.moments = method.needs(options),
                                     .sample_tokens = 2048,
                                     .seed = options.seed,
                                     .held_out_tokens = options.budget_bits ? 512 : 0};
          std::vector<LayerStats> layers;
          for (int i = 0; i < 4; ++i) {
            layers.push_back(collect(layer, request, backend));
            layers.back().layer = i;
          }
          const MemoryStats stats(std::move(layers));
          std::vector<double> all;
          for (const LayerPlan& plan : method.decide(stats, options, {.backend = backend}).plans)
            for (const Side side : kSides) {
              const TensorPlan& own = *plan.side(side);
              all.insert(all.end(), own.rotation.matrix.begin(), own.rotation.matrix.end());
              all.insert(all.end(), own.clip_ratio.begin(), own.clip_ratio.end());
              if (own.error) all.push_back(own.error->after);
            }
          return all;
        },
        false);
  }
}

TEST_CASE("Too small a limit is refused with the size that is enough") {
  const LayerActivations layer = layer_of(9001, 128, DType::bf16);
  const auto moments_within = [&](std::int64_t limit) {
    const auto backend = backend_with(limit);
    std::vector<AttentionMoments> moments(4, {MomentSum{128}, MomentSum{0}, {}});
    backend->add_attention_moments({.geometry = layer.geometry,
                                    .q = layer.q.view(),
                                    .k = layer.k.view(),
                                    .v = layer.v->view(),
                                    .first = 0,
                                    .count = layer.k.tokens},
                                   false, moments, {});
  };
  try {
    moments_within(cuda::bytes_beside(1) + 1'000'000);
    FAIL("accepted");
  } catch (const Error& error) {
    const std::string text = error.what(), least = "at least ";
    CHECK(text.starts_with("CUDA device: attention moments: expected room for "));
    const double gigabytes = std::stod(text.substr(text.find(least) + least.size()));
    CHECK_NOTHROW(moments_within(static_cast<std::int64_t>(gigabytes * 1e9)));
  }
}

}  // namespace kvq::test
