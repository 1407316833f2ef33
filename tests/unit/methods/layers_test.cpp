#include <kvq/core/error.h>
#include <kvq/methods/decide.h>
#include <kvq/stats/collect.h>

#include "support/decide.h"
#include "support/error_of.h"
#include "support/free_backend.h"
#include "support/same_artifact.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <atomic>
#include <stdexcept>

using namespace kvq;

namespace {

constexpr int kLayers = 10;  // more than are in work at a time

Options options_for(const std::string& method) {
  return test::options_of(method, [&](Options& options) {
    if (method != "kvq") return;
    options.budget_bits = 2.0;
    options.k.coder = options.v.coder = CoderKind::symmetric;  // quicker than a trellis
  });
}

std::vector<LayerStats> stats_of_layers(const Options& options) {
  std::vector<LayerStats> all;
  for (int layer = 0; layer < kLayers; ++layer) {
    const LayerActivations activations =
        test::make_layer({.layer = layer, .head_dim = 16, .v_head_dim = 16, .lengths = {70}, .seed = 7});
    all.push_back(collect(activations, {.moments = find_method(options.method).needs(options),
                                        .sample_tokens = 24,
                                        .seed = options.seed,
                                        .held_out_tokens = 20,
                                        .golden_tokens = 5}));
  }
  return all;
}

DecisionOrigin origin_of(const std::vector<LayerStats>& stats) {
  DecisionOrigin origin;
  origin.header.model.config_json = "{}";
  for (const LayerStats& layer : stats) {
    origin.header.model.layers.push_back({layer.layer, layer.geometry, layer.has_values});
    origin.content_hashes.push_back(layer.content_hash);
  }
  return origin;
}

/// Fails to load some layers.
class FaultyStats : public test::MemoryStats {
 public:
  FaultyStats(std::vector<LayerStats> layers, std::vector<std::size_t> faulty)
      : MemoryStats(std::move(layers)), faulty_(std::move(faulty)) {}
  std::shared_ptr<const LayerStats> load(std::size_t index) const override {
    if (std::find(faulty_.begin(), faulty_.end(), index) != faulty_.end())
      throw Error{ErrorKind::bad_input, "layer " + std::to_string(index) + " is damaged"};
    return MemoryStats::load(index);
  }

 private:
  std::vector<std::size_t> faulty_;
};

}  // namespace

TEST_CASE("Layers that are decided side by side have the artifact of a run layer by layer", "[methods]") {
  for (const std::string name : {"oscar", "saw-int4", "block-gtq", "kvq"}) {
    INFO(name);
    const Options options = options_for(name);
    const std::vector<LayerStats> stats = stats_of_layers(options);
    const test::MemoryStats source(stats);
    const Method& method = find_method(name);
    const Artifact expected = decide(method, source, origin_of(stats), options, 4);
    test::FreeBackend backend;
    std::vector<std::size_t> done;
    const Artifact found = decide(method, source, origin_of(stats), options, 4,
                                  {.done = [&](std::size_t i) { done.push_back(i); }, .backend = backend});
    test::check_equal(expected, found);
    REQUIRE(done.size() == kLayers);
    for (std::size_t i = 0; i < done.size(); ++i) CHECK(done[i] == i);
    CHECK(expected.golden.size() == kLayers);
    CHECK(!expected.calibration.held_out.is_null());
  }
}

TEST_CASE("Of layers that are decided side by side, the lowest that fails gives the error", "[methods]") {
  for (const std::string name : {"oscar", "block-gtq", "kvq"}) {
    INFO(name);
    const Options options = options_for(name);
    const FaultyStats source(stats_of_layers(options), {4, 6});
    test::FreeBackend backend;
    std::vector<std::size_t> done;
    const MethodContext context{.done = [&](std::size_t i) { done.push_back(i); }, .backend = backend};
    CHECK(test::error_text([&] { find_method(name).decide(source, options, context); }) ==
          "bad_input: layer 4 is damaged");
    CHECK(done == std::vector<std::size_t>{0, 1, 2, 3});
  }
}

TEST_CASE("A verb that fails ends layers that are decided side by side", "[methods]") {
  const Options options = options_for("oscar");
  const test::MemoryStats source(stats_of_layers(options));
  std::atomic<int> calls = 0;
  test::FreeBackend backend([&](const std::string&) {
    if (++calls == 60) throw std::runtime_error("device lost");
  });
  CHECK_THROWS_WITH(find_method("oscar").decide(source, options, {.backend = backend}), "device lost");
}

TEST_CASE("Without held-out tokens in some layer there is no held-out report", "[methods]") {
  const Options options = options_for("saw-int4");
  std::vector<LayerStats> stats = stats_of_layers(options);
  stats[kLayers - 1].held_out.reset();
  test::FreeBackend backend;
  const Artifact artifact =
      decide(find_method("saw-int4"), test::MemoryStats(stats), origin_of(stats), options, 0, {.backend = backend});
  CHECK(artifact.calibration.held_out.is_null());
}
