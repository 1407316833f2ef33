#include <kvq/compute/parallel.h>
#include <kvq/stats/collect.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/layers.h"
#include "support/naive_stats.h"

#include <catch2/catch.hpp>

#include <atomic>

using namespace kvq;
using Catch::Matchers::Contains;

namespace {

void check_moments(const LayerActivations& layer) {
  const LayerStats stats = collect(layer, {.moments = test::all_moments(layer.v.has_value()), .sample_tokens = 10});
  for (const Moment which : test::all_moments(layer.v.has_value())) {
    REQUIRE(stats.moment(which).size() == static_cast<std::size_t>(layer.geometry.num_kv_heads));
    // The moments that use S, and the weights of sst, come from float32 scores; all others are exact products summed in
    // double.
    const double bound = which == Moment::query || which == Moment::key || which == Moment::value ? 1e-12 : 1e-5;
    for (int head = 0; head < layer.geometry.num_kv_heads; ++head) {
      INFO(to_string(which) << ", head " << head);
      const MomentSum& found = stats.moment(which)[static_cast<std::size_t>(head)];
      const test::NaiveMoment expected = test::naive_moment(layer, which, head);
      CHECK(test::relative_difference(found.sum, expected.sum) < bound);
      CHECK(test::relative_difference(found.mean, expected.first) < bound);
      CHECK(found.weight == Approx(expected.weight).epsilon(bound));
    }
  }
  CHECK(stats.tokens == layer.k.tokens);
  CHECK(stats.sequences == static_cast<std::int64_t>(layer.cu_seqlens.size()) - 1);
  CHECK(stats.geometry == layer.geometry);
  CHECK(stats.content_hash == layer.content_hash);
}

}  // namespace

TEST_CASE("Every moment is what formats/stats.md says it is", "[stats]") {
  SECTION("grouped queries, odd lengths") { check_moments(test::make_layer({})); }
  SECTION("as many keys as queries") { check_moments(test::make_layer({.num_q_heads = 3, .num_kv_heads = 3})); }
  SECTION("one key head") { check_moments(test::make_layer({.num_q_heads = 8, .num_kv_heads = 1, .lengths = {67}})); }
  SECTION("a sliding window") { check_moments(test::make_layer({.lengths = {31, 5, 17}, .sliding_window = 7})); }
  SECTION("bfloat16") { check_moments(test::make_layer({.dtype = DType::bf16})); }
  SECTION("float16") { check_moments(test::make_layer({.dtype = DType::f16})); }
  SECTION("wide values") { check_moments(test::make_layer({.head_dim = 6, .v_head_dim = 20})); }
  SECTION("outliers") { check_moments(test::make_layer({.softmax_scale = 0.01, .outliers = true})); }
  SECTION("a layer without values") { check_moments(test::make_layer({.has_values = false})); }
  SECTION("more tokens than a block of rows") {
    check_moments(test::make_layer({
        .num_q_heads = 2,
        .num_kv_heads = 1,
        .head_dim = 3,
        .v_head_dim = 2,
        .lengths = std::vector<std::int64_t>(211, 23),
    }));
  }
}

TEST_CASE("Sequences do not see each other", "[stats]") {
  const LayerActivations layer = test::make_layer({.lengths = {13, 9}});
  const StatsRequest request{.moments = {Moment::scored_value}, .sample_tokens = 5};
  const auto joint = collect(layer, request).moment(Moment::scored_value),
             first = collect(test::keep_sequences(layer, 0, 1), request).moment(Moment::scored_value),
             second = collect(test::keep_sequences(layer, 1, 1), request).moment(Moment::scored_value);
  for (std::size_t head = 0; head < 2; ++head) {
    MomentSum sum = first[head];
    sum.add(second[head]);
    CHECK(test::relative_difference(joint[head].sum, sum.sum) < 1e-12);
  }
}

TEST_CASE("The sst moment is OSCAR's published one: no softmax, no mask, weights relative to their mean", "[stats]") {
  // compute_sst: V^T diag(w / mean(w)) V / T. The order of tokens does not matter.
  const LayerActivations layer =
      test::make_layer({.num_q_heads = 2, .num_kv_heads = 1, .head_dim = 4, .v_head_dim = 3, .lengths = {11}});
  LayerActivations reversed = layer;
  const auto flip = [](ActivationTensor& tensor) {
    const std::vector<std::byte> raw = tensor.raw;
    const std::size_t row = raw.size() / 11;
    for (std::size_t t = 0; t < 11; ++t)
      std::copy_n(raw.begin() + static_cast<std::ptrdiff_t>((10 - t) * row), row,
                  tensor.raw.begin() + static_cast<std::ptrdiff_t>(t * row));
  };
  flip(reversed.q);
  flip(reversed.k);
  flip(*reversed.v);
  const StatsRequest request{.moments = {Moment::sst}, .sample_tokens = 3};
  const MomentSum a = collect(layer, request).moment(Moment::sst)[0],
                  b = collect(reversed, request).moment(Moment::sst)[0];
  CHECK(test::relative_difference(a.sum, b.sum) < 1e-6);
}

TEST_CASE("Nothing is collected that was not asked for or needed", "[stats]") {
  const LayerActivations layer = test::make_layer({});
  const LayerStats keys = collect(layer, {.moments = {Moment::key}, .sample_tokens = 4});
  CHECK(keys.moments.size() == 1);
  CHECK(keys.sample.value_weight.empty());
  CHECK_THAT(test::error_text([&] { keys.moment(Moment::query); }),
             Catch::Matchers::StartsWith("usage: ") && Contains("layer 0") && Contains("query"));
  const LayerStats scored = collect(layer, {.moments = {Moment::scored_value}, .sample_tokens = 4});
  CHECK(!scored.moments.contains(Moment::scored_query));
  CHECK(!scored.sample.value_weight.empty());
}

TEST_CASE("A value moment of a layer without values is refused by name", "[stats]") {
  const LayerActivations layer = test::make_layer({.layer = 4, .has_values = false});
  for (const Moment which : {Moment::value, Moment::scored_value, Moment::scored_query, Moment::sst})
    CHECK_THAT(test::error_text([&] { collect(layer, {.moments = {which}, .sample_tokens = 4}); }),
               Catch::Matchers::StartsWith("usage: ") && Contains("layer 4") && Contains(to_string(which)));
}

TEST_CASE("Statistics have the same bits for any number of threads", "[stats]") {
  const LayerActivations layer = test::make_layer({.num_q_heads = 6, .num_kv_heads = 2, .lengths = {301, 1, 77}});
  const auto with_threads = [&](int threads) {
    const ThreadLimit limit(threads);
    return collect(layer, {.moments = test::all_moments(true), .sample_tokens = 50});
  };
  const LayerStats one = with_threads(1);
  for (const int threads : {2, 3}) {
    const LayerStats many = with_threads(threads);
    for (const Moment which : test::all_moments(true))
      for (std::size_t head = 0; head < 2; ++head) {
        INFO(to_string(which));
        CHECK(one.moment(which)[head].sum == many.moment(which)[head].sum);
        CHECK(one.moment(which)[head].mean == many.moment(which)[head].mean);
        CHECK(one.moment(which)[head].weight == many.moment(which)[head].weight);
      }
    CHECK(one.sample.value_weight == many.sample.value_weight);
  }
}

TEST_CASE("Progress ends at the total", "[stats]") {
  std::atomic<std::int64_t> last = 0, all = 0;
  collect(test::make_layer({}), {.moments = {Moment::scored_value}, .sample_tokens = 4}, cpu_backend(),
          [&](std::int64_t done, std::int64_t total) {
            last = std::max<std::int64_t>(last, done);
            all = total;
          });
  CHECK(all == 45 * 2);
  CHECK(last == all);
}

TEST_CASE("A centered mean moment is the moment of the centered rows", "[stats]") {
  const LayerActivations layer = test::make_layer({.seed = 3, .outliers = true});
  const MomentSum sum = collect(layer, {.moments = {Moment::key}, .sample_tokens = 4}).moment(Moment::key)[1];
  const std::vector<double> mean = mean_vector(sum);
  std::vector<float> rows(45 * 16);
  layer.k.load_head(1, 0, 45, rows.data());
  std::vector<double> expected(256, 0.0), expected_mean(16, 0.0), plain(256, 0.0);
  for (std::size_t t = 0; t < 45; ++t)
    for (std::size_t i = 0; i < 16; ++i) {
      const auto x = static_cast<double>(rows[t * 16 + i]);
      expected_mean[i] += x / 45;
      for (std::size_t j = 0; j < 16; ++j) {
        const auto y = static_cast<double>(rows[t * 16 + j]);
        expected[i * 16 + j] += (x - mean[i]) * (y - mean[j]) / 45;
        plain[i * 16 + j] += x * y / 45;
      }
    }
  CHECK(test::relative_difference(mean, expected_mean) < 1e-13);
  CHECK(test::relative_difference(mean_moment(sum), plain) < 1e-13);
  CHECK(test::relative_difference(mean_moment(sum, mean), expected) < 1e-12);
}

TEST_CASE("Moments are called what the format calls them", "[stats]") {
  const char* names[] = {"query", "key", "value", "scored_value", "scored_query", "sst"};
  std::size_t i = 0;
  for (const Moment which : kAllMoments) {
    CHECK(std::string(to_string(which)) == names[i++]);
    CHECK(moment_from_string(to_string(which)) == which);
  }
  CHECK(moment_from_string("Query") == std::nullopt);
}
