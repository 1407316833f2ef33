#include <kvq/stats/collect.h>
#include <kvq/stats/stats_file.h>

#include "support/compare.h"
#include "support/container_edit.h"
#include "support/layers.h"
#include "support/temp_folder.h"

#include <rapidcheck/catch.h>
#include <catch2/catch.hpp>

using namespace kvq;

namespace {

test::LayerSpec any_spec() {
  test::LayerSpec spec{.layer = *rc::gen::inRange(0, 4)};
  spec.num_kv_heads = *rc::gen::inRange(1, 4);
  spec.num_q_heads = spec.num_kv_heads * *rc::gen::inRange(1, 4);
  spec.head_dim = *rc::gen::inRange(1, 9);
  spec.v_head_dim = *rc::gen::inRange(1, 9);
  const auto count = static_cast<std::size_t>(*rc::gen::inRange(2, 6));
  spec.lengths = *rc::gen::container<std::vector<std::int64_t>>(count, rc::gen::inRange<std::int64_t>(1, 20));
  spec.has_values = *rc::gen::inRange(0, 4) != 0;
  spec.dtype = *rc::gen::element(DType::f32, DType::f16, DType::bf16);
  spec.sliding_window = *rc::gen::element(0, 0, 1, 5);
  spec.seed = *rc::gen::inRange<std::uint64_t>(0, 1000);
  return spec;
}

StatsRequest request_for(bool has_values) {
  StatsRequest request{
      .moments = test::all_moments(has_values),
      .sample_tokens = *rc::gen::inRange<std::int64_t>(1, 50),
      .seed = *rc::gen::arbitrary<std::uint32_t>(),
  };
  request.moments.erase(Moment::sst);
  return request;
}

}  // namespace

TEST_CASE("Statistics of any two parts merge into those of the whole", "[stats][property]") {
  rc::prop("any layer, any cut", [] {
    const test::LayerSpec spec = any_spec();
    const LayerActivations layer = test::make_layer(spec);
    const StatsRequest request = request_for(spec.has_values);
    const auto cut = static_cast<std::size_t>(*rc::gen::inRange(1, static_cast<int>(spec.lengths.size())));
    const LayerStats joint = collect(layer, request);
    LayerStats merged = collect(test::keep_sequences(layer, 0, cut), request);
    merge(merged, collect(test::keep_sequences(layer, cut, spec.lengths.size() - cut), request), request.sample_tokens);
    for (const Moment which : request.moments)
      for (std::size_t head = 0; head < joint.moment(which).size(); ++head)
        RC_ASSERT(test::relative_difference(merged.moment(which)[head].sum, joint.moment(which)[head].sum) < 1e-12);
    RC_ASSERT(merged.sample.key == joint.sample.key);
    RC_ASSERT(merged.sample.token == joint.sample.token);
    RC_ASSERT(merged.sample.q.raw == joint.sample.q.raw);
    RC_ASSERT(merged.sample.value_weight == joint.sample.value_weight);
  });
}

TEST_CASE("Moments of all queries are those of generated and of prompt queries together", "[stats][property]") {
  rc::prop("any layer, any marks", [] {
    const test::LayerSpec spec = any_spec();
    LayerActivations layer = test::make_layer(spec);
    layer.generated = *rc::gen::container<std::vector<std::uint8_t>>(static_cast<std::size_t>(layer.k.tokens),
                                                                     rc::gen::inRange<std::uint8_t>(0, 2));
    layer.generated.front() = 0, layer.generated.back() = 1;
    StatsRequest request = request_for(spec.has_values);
    const LayerStats all = collect(layer, request);
    request.queries = Queries::generated;
    const LayerStats generated = collect(layer, request);
    request.queries = Queries::prompt;
    const LayerStats prompt = collect(layer, request);
    for (const Moment which : request.moments) {
      const bool of_queries = which == Moment::query || which == Moment::scored_value || which == Moment::scored_query;
      for (std::size_t head = 0; head < all.moment(which).size(); ++head) {
        MomentSum sum = generated.moment(which)[head];
        if (of_queries) sum.add(prompt.moment(which)[head]);
        RC_ASSERT(test::relative_difference(sum.sum, all.moment(which)[head].sum) < 1e-5);
        RC_ASSERT(sum.weight == all.moment(which)[head].weight);
      }
    }
  });
}

TEST_CASE("Any statistics survive their file, byte for byte", "[stats][property]") {
  rc::prop("any layer", [] {
    const test::TempFolder folder;
    const test::LayerSpec spec = any_spec();
    const StatsRequest request = request_for(spec.has_values);
    const StatsHeader header{
        .model = {.name = "m", .fingerprint = "", .config_json = "", .num_layers = 4, .layers = {}},
        .producer = "p",
        .capture_point = "pre_rope",
        .seed = request.seed,
        .sample_tokens = request.sample_tokens,
    };
    save_stats(header, std::vector<LayerStats>{collect(test::make_layer(spec), request)}, folder / "a");
    const StatsFile file = StatsFile::open(folder / "a");
    save_stats(file.header(), std::vector<LayerStats>{file.load(0)}, folder / "b");
    RC_ASSERT(test::file_bytes(folder / "a") == test::file_bytes(folder / "b"));
  });
}
