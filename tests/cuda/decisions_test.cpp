#include <kvq/compute/cuda_library.h>
#include <kvq/dump/dump_file.h>
#include <kvq/stats/collect.h>

#include "support/compare.h"
#include "support/decide.h"

#include <catch2/catch.hpp>

#include <filesystem>
#include <functional>
#include <variant>

namespace kvq::test {

namespace {

/// What of a side was chosen from some possibilities must be equal; numbers agree within the bounds of statistics.
void check_same_decision(const TensorPlan& cuda, const TensorPlan& cpu) {
  CHECK(cuda.coder.index() == cpu.coder.index());
  CHECK(cuda.clip_ratio == cpu.clip_ratio);
  CHECK(cuda.rotation.kind == cpu.rotation.kind);
  CHECK(cuda.rotation.recipe == cpu.rotation.recipe);
  CHECK(cuda.rotation.signs == cpu.rotation.signs);
  CHECK(cuda.rotation.sign_choice == cpu.rotation.sign_choice);
  REQUIRE(cuda.rotation.matrix.size() == cpu.rotation.matrix.size());
  if (!cpu.rotation.matrix.empty()) CHECK(relative_difference(cuda.rotation.matrix, cpu.rotation.matrix) < 1e-3);
  REQUIRE(cuda.allocation.has_value() == cpu.allocation.has_value());
  if (cpu.allocation) CHECK(cuda.allocation->channel_bits == cpu.allocation->channel_bits);
  CHECK(cuda.transform.has_value() == cpu.transform.has_value());
  REQUIRE(cuda.centroids.has_value() == cpu.centroids.has_value());
  if (cpu.centroids) {
    CHECK(relative_difference(cuda.centroids->inertia, cpu.centroids->inertia) < 1e-12);
    CHECK(relative_difference(cuda.centroids->values, cpu.centroids->values) < 1e-6);
  }
  if (const auto* coder = std::get_if<CodebookCoder>(&cpu.coder))
    CHECK(std::get<CodebookCoder>(cuda.coder).tables == coder->tables);
  REQUIRE(cuda.error.has_value() == cpu.error.has_value());
  if (cpu.error) CHECK(cuda.error->after == Approx(cpu.error->after).epsilon(1e-3));
}

/// Whether a device decides as processors do.
void check_decisions(const Method& method, Backend& backend, const LayerActivations& layer,
                     const std::function<void(Options&)>& change) {
  const Options options = options_of(method.name, [&](Options& o) { o.seed = 3, change(o); });
  const auto decide_on = [&](Backend& on) {
    const StatsRequest request{.moments = method.needs(options),
                               .sample_tokens = 256,
                               .seed = options.seed,
                               .held_out_tokens = options.budget_bits || options.budget_bytes ? 64 : 0};
    const MemoryStats stats({collect(layer, request, on)});
    return method.decide(stats, options, {.backend = on}).plans.at(0);
  };
  const LayerPlan cuda = decide_on(backend), cpu = decide_on(cpu_backend());
  for (const Side side : kSides) {
    INFO(name(side));
    check_same_decision(*cuda.side(side), *cpu.side(side));
  }
}

LayerActivations synthetic_layer(int dim) {
  return make_layer({.head_dim = dim,
                     .v_head_dim = dim,
                     .lengths = {700, 300},
                     .dtype = dim == 64 ? DType::f32 : DType::bf16,
                     .softmax_scale = 0.1,
                     .outliers = true});
}

}  // namespace

TEST_CASE("Every method decides on a CUDA device as on processors") {
  const int device = 0;
  const auto backend = CudaLibrary().make_backend(std::span(&device, 1));
  for (const int dim : {64, 128})
    for (const Method& method : methods()) {
      INFO(method.name << ", head_dim " << dim);
      check_decisions(method, *backend, synthetic_layer(dim), [](Options&) {});
    }
}

TEST_CASE("Every method decides about the sample dump on a CUDA device as on processors") {
  // The folder where the test was compiled may be on another machine.
  const std::filesystem::path name = "sample_data/calibration.h5";
  const Dump dump = Dump::open({exists(name) ? name : std::filesystem::path(KVQ_SOURCE_DIR) / name});
  const int device = 0;
  const auto backend = CudaLibrary().make_backend(std::span(&device, 1));
  for (const LayerEntry& entry : dump.model().layers) {
    const LayerActivations layer = dump.load_layer(entry.layer);
    for (const Method& method : methods()) {
      INFO(method.name << ", layer " << entry.layer);
      check_decisions(method, *backend, layer, [](Options&) {});
    }
  }
}

TEST_CASE("Centroids and fitted codebooks on a CUDA device are those of processors") {
  const int device = 0;
  const auto backend = CudaLibrary().make_backend(std::span(&device, 1));
  for (const bool joint : {false, true})
    check_decisions(find_method("saw-int4"), *backend, synthetic_layer(128), [&](Options& o) {
      o.k.kmeans = 16, o.v.kmeans = 5;
      o.kmeans_restarts = 2;
      o.kmeans_joint = joint;
    });
  check_decisions(find_method("block-gtq"), *backend, synthetic_layer(128), [](Options& o) { o.k.fitted = true; });
}

}  // namespace kvq::test
