#include <kvq/stats/collect.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/layers.h"

#include <catch2/catch.hpp>

using namespace kvq;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

namespace {

std::set<Moment> mergeable(bool has_values) {
  std::set<Moment> moments = test::all_moments(has_values);
  moments.erase(Moment::sst);
  return moments;
}

void check_split(const LayerActivations& layer, const std::vector<std::size_t>& cuts) {
  const bool has_values = layer.v.has_value();
  const StatsRequest request{.moments = mergeable(has_values), .sample_tokens = 21, .seed = 5};
  const LayerStats joint = collect(layer, request);
  LayerStats merged = collect(test::keep_sequences(layer, 0, cuts[0]), request);
  for (std::size_t i = 0; i < cuts.size(); ++i) {
    const std::size_t end = i + 1 < cuts.size() ? cuts[i + 1] : layer.cu_seqlens.size() - 1;
    merge(merged, collect(test::keep_sequences(layer, cuts[i], end - cuts[i]), request), request.sample_tokens);
  }
  CHECK(merged.tokens == joint.tokens);
  CHECK(merged.sequences == joint.sequences);
  REQUIRE(merged.moments.size() == joint.moments.size());
  for (const Moment which : request.moments)
    for (std::size_t head = 0; head < joint.moment(which).size(); ++head) {
      INFO(to_string(which) << ", head " << head);
      CHECK(test::relative_difference(merged.moment(which)[head].sum, joint.moment(which)[head].sum) < 1e-12);
      CHECK(test::relative_difference(merged.moment(which)[head].mean, joint.moment(which)[head].mean) < 1e-12);
      CHECK(merged.moment(which)[head].weight == Approx(joint.moment(which)[head].weight).epsilon(1e-12));
    }
  CHECK(merged.sample.key == joint.sample.key);
  CHECK(merged.sample.token == joint.sample.token);
  CHECK(merged.sample.q.raw == joint.sample.q.raw);
  CHECK(merged.sample.k.raw == joint.sample.k.raw);
  CHECK(merged.sample.v.raw == joint.sample.v.raw);
  CHECK(merged.sample.value_weight == joint.sample.value_weight);
}

}  // namespace

TEST_CASE("Merged shards are the joint run: sums up to rounding, the sample exactly", "[stats]") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const LayerActivations layer = test::make_layer({.lengths = {13, 1, 31, 7, 2}, .dtype = dtype});
    check_split(layer, {1});
    check_split(layer, {3});
    check_split(layer, {1, 2, 3, 4});
  }
  check_split(test::make_layer({.lengths = {13, 1, 31}, .sliding_window = 5, .outliers = true}), {2});
  check_split(test::make_layer({.lengths = {13, 1, 31}, .has_values = false}), {1, 2});
}

TEST_CASE("Merging is associative", "[stats]") {
  const LayerActivations layer = test::make_layer({.lengths = {13, 17, 31}});
  const StatsRequest request{.moments = mergeable(true), .sample_tokens = 15};
  const auto part = [&](std::size_t s) { return collect(test::keep_sequences(layer, s, 1), request); };
  LayerStats left = part(0), right = part(1), outer = part(0);
  merge(left, part(1), 15);
  merge(left, part(2), 15);
  merge(right, part(2), 15);
  merge(outer, right, 15);
  for (const Moment which : request.moments)
    CHECK(test::relative_difference(left.moment(which)[0].sum, outer.moment(which)[0].sum) < 1e-13);
  CHECK(left.sample.key == outer.sample.key);
  CHECK(left.sample.token == outer.sample.token);
}

TEST_CASE("Statistics that do not belong together are not merged", "[stats]") {
  const StatsRequest request{.moments = {Moment::query, Moment::key}, .sample_tokens = 5};
  const LayerStats stats = collect(test::make_layer({.layer = 3}), request);
  const auto merged_with = [&](const LayerStats& other) {
    LayerStats into = stats;
    return test::error_text([&] { merge(into, other, 5); });
  };
  CHECK(merged_with(collect(test::make_layer({.layer = 3, .seed = 2}), request)) == "no error");
  CHECK_THAT(merged_with(stats),
             StartsWith("bad_input: ") && Contains("layer 3") && Contains("both hold tokens 0 to "));
  CHECK_THAT(merged_with(collect(test::make_layer({.layer = 4}), request)), StartsWith("bad_input: "));
  CHECK_THAT(merged_with(collect(test::make_layer({.layer = 3, .head_dim = 8}), request)),
             StartsWith("bad_input: ") && Contains("layer 3"));
  CHECK_THAT(merged_with(collect(test::make_layer({.layer = 3, .softmax_scale = 0.5}), request)),
             StartsWith("bad_input: "));
  CHECK_THAT(merged_with(collect(test::make_layer({.layer = 3}), {.moments = {Moment::query}, .sample_tokens = 5})),
             StartsWith("bad_input: "));
  CHECK_THAT(merged_with(collect(test::make_layer({.layer = 3}),
                                 {.moments = {Moment::query, Moment::value}, .sample_tokens = 5})),
             StartsWith("bad_input: "));
}

TEST_CASE("Shards by sequences that hold sst are refused: its weights need the joint query moment", "[stats]") {
  LayerStats into = collect(test::make_layer({}), {.moments = {Moment::sst}, .sample_tokens = 5});
  const LayerStats other = into;
  CHECK_THAT(test::error_text([&] { merge(into, other, 5); }), StartsWith("unsupported: ") && Contains("sst"));
}
