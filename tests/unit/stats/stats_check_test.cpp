#include <kvq/stats/collect.h>
#include <kvq/stats/stats_check.h>
#include <kvq/stats/token_ranges.h>

#include "support/error_of.h"
#include "support/layers.h"

#include <catch2/catch.hpp>

#include <functional>

using namespace kvq;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

namespace {

constexpr StatsPromise kPromise{.sample_tokens = 12};

LayerStats sound_stats(std::int64_t held_out_tokens = 20) {
  LayerActivations layer = test::make_layer({.layer = 3, .lengths = {30, 40}});
  return collect(layer, {.moments = test::all_moments(true),
                         .sample_tokens = 12,
                         .held_out_tokens = held_out_tokens,
                         .golden_tokens = 5});
}

std::string fault(const std::function<void(LayerStats&)>& change, const LayerStats& sound = sound_stats()) {
  LayerStats stats = sound;
  change(stats);
  return test::error_text([&] { check_stats(stats, kPromise, "a.stats"); });
}

}  // namespace

TEST_CASE("Collected and merged statistics agree with themselves", "[stats]") {
  for (const std::int64_t held_out : {0, 20}) CHECK(fault([](LayerStats&) {}, sound_stats(held_out)) == "no error");
  const StatsRequest request{.moments = {Moment::query, Moment::key, Moment::scored_value, Moment::scored_query},
                             .sample_tokens = 12,
                             .held_out_tokens = 20};
  LayerStats merged = collect(test::make_layer({.lengths = {30, 40}, .seed = 1}), request);
  merge(merged, collect(test::make_layer({.lengths = {60}, .seed = 2}), request), 12);
  merge(merged, collect(test::make_layer({.lengths = {3}, .seed = 3}), request), 12);
  CHECK(fault([](LayerStats&) {}, merged) == "no error");
  const LayerStats keys =
      collect(test::make_layer({.has_values = false}), {.moments = {Moment::query, Moment::key}, .sample_tokens = 12});
  CHECK(fault([](LayerStats&) {}, keys) == "no error");
  const LayerStats one = collect(test::make_layer({.lengths = {1}}), {.moments = test::all_moments(true)});
  CHECK(fault([](LayerStats&) {}, one) == "no error");
}

TEST_CASE("Statistics that contradict themselves are refused by file, layer and tensor", "[stats]") {
  const auto expect = [](const char* words, const std::function<void(LayerStats&)>& change) {
    CHECK_THAT(fault(change), StartsWith("bad_input: a.stats: layer 3: ") && Contains(words));
  };
  expect("tensor query.weight: head 1: expected 100", [](LayerStats& s) { s.moments[Moment::query][1].weight = 99; });
  expect("tensor value.weight: head 0", [](LayerStats& s) { s.moments[Moment::value][0].weight = 51; });
  expect("tensor query.weight: head 0: expected a whole number up to 100",
         [](LayerStats& s) { s.moments[Moment::query][0].weight = 102; });
  expect("tensor query.weight: head 0: expected a whole number", [](LayerStats& s) {
    for (auto& [moment, sums] : s.moments)
      for (MomentSum& sum : sums) sum.weight *= 0.99;
  });
  expect("tensor key.sum: head 1: expected a diagonal that is not negative",
         [](LayerStats& s) { s.moments[Moment::key][1].sum[0] = -1.0; });
  expect("tensor scored_value.sum: head 0: expected a symmetric matrix",
         [](LayerStats& s) { s.moments[Moment::scored_value][0].sum[1] += 1.0; });
  for (const Moment moment : kAllMoments)
    expect(".sum: head 1: expected a second moment", [moment](LayerStats& s) {
      MomentSum& sum = s.moments[moment][1];  // a correlation of 2
      sum.sum[1] = sum.sum[static_cast<std::size_t>(sum.dim)] =
          2.0 * (sum.sum[0] + sum.sum[1 + static_cast<std::size_t>(sum.dim)]);
    });
  expect("tensor key.sum: head 0: expected a second moment of rows with the mean of .first",
         [](LayerStats& s) { s.moments[Moment::key][0].mean[2] = 1e4; });
  expect("tensor sample.token: expected tokens below 70, found 70", [](LayerStats& s) { s.sample.token[1] = 70; });
  expect("tensor sample.token: expected tokens below 70, found -1", [](LayerStats& s) { s.sample.token[1] = -1; });
  expect("is held out", [](LayerStats& s) { s.sample.token[1] = s.held_out->token; });
  expect("tensor sample.value_weight: expected it", [](LayerStats& s) { s.sample.value_weight.clear(); });
  expect("tensor golden.token: expected 5 tokens", [](LayerStats& s) { s.golden->first = 66; });
  expect("tensor held_out.token: expected 20 tokens", [](LayerStats& s) { s.held_out->token = 51; });
  expect("tensor held_out.curvature: head 2: expected a positive semidefinite matrix", [](LayerStats& s) {
    s.held_out->curvature.assign(4 * 12 * 12, 0.0f);
    s.held_out->curvature[2 * 144] = -1.0f;
  });
  expect("tensor o_proj_metric: head 1: expected a positive semidefinite matrix", [](LayerStats& s) {
    s.o_proj_metric.assign(2 * 12 * 12, 0.0);
    s.o_proj_metric[144 + 1] = s.o_proj_metric[144 + 12] = 1.0;
  });
  expect("ranges: expected 70 tokens, found 71", [](LayerStats& s) { s.ranges[0].count = 71; });
  expect("ranges: expected no token twice",
         [](LayerStats& s) { s.ranges = {{s.ranges[0].dump, 0, 40}, {s.ranges[0].dump, 39, 30}}; });
  expect("sequences", [](LayerStats& s) { s.sequences = 71; });
}

TEST_CASE("A sample is no larger than promised", "[stats]") {
  LayerStats stats = sound_stats();
  CHECK_THAT(test::error_text([&] { check_stats(stats, {.sample_tokens = 11}, "a"); }),
             Contains("tensor sample.key: expected at most 11 sampled tokens, found 12"));
}

TEST_CASE("Ranges of tokens are joined where one continues the other, and overlaps are found", "[stats]") {
  std::vector<DumpRange> ranges{{"a", 0, 5}};
  append_ranges(ranges, {{"a", 5, 5}, {"b", 10, 1}, {"a", 20, 1}});
  CHECK(ranges == std::vector<DumpRange>{{"a", 0, 10}, {"b", 10, 1}, {"a", 20, 1}});
  CHECK(total_tokens(ranges) == 12);
  CHECK_FALSE(overlaps_itself(ranges));
  CHECK(find_overlap(ranges, {{"c", 0, 100}, {"b", 0, 10}, {"a", 10, 10}}) == std::nullopt);
  CHECK(find_overlap(ranges, {{"a", 8, 20}}) == DumpRange{"a", 8, 2});
  CHECK(find_overlap(ranges, {{"b", 0, 11}}) == DumpRange{"b", 10, 1});
  ranges.push_back({"b", 0, 11});
  CHECK(overlaps_itself(ranges));
}
