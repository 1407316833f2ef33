#include <kvq/codec/codec.h>
#include <kvq/compute/attention_moment.h>
#include <kvq/compute/parallel.h>

#include "support/compare.h"
#include "support/naive_attention.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

using namespace kvq;

namespace {

AttentionMoments empty_moments(const test::AttentionCase& input) {
  return {.outputs = MomentSum(input.v_dim), .scored_query = MomentSum(input.dim), .column_energy = {}};
}

void add(const test::AttentionCase& input, bool scored, AttentionMoments& into) {
  add_attention_moments(
      {
          .tokens = input.tokens,
          .queries = input.queries,
          .dim = input.dim,
          .v_dim = input.v_dim,
          .scale = input.scale,
          .window = input.window,
          .cap = input.cap,
          .sinks = input.sinks,
          .q = input.q.data(),
          .k = input.k.data(),
          .v = input.v.data(),
      },
      scored, into);
}

AttentionMoments moments_of(const test::AttentionCase& input, bool scored = true) {
  AttentionMoments moments = empty_moments(input);
  add(input, scored, moments);
  moments.outputs.symmetrize();
  moments.scored_query.symmetrize();
  return moments;
}

void check(const test::AttentionCase& input, double bound) {
  INFO(input.tokens << " tokens, " << input.queries << " queries, dims " << input.dim << " and " << input.v_dim
                    << ", window " << input.window);
  const AttentionMoments found = moments_of(input);
  const test::NaiveMoments expected = test::naive_moments(input);
  CHECK(test::relative_difference(found.outputs.sum, expected.outputs) < bound);
  CHECK(test::relative_difference(found.outputs.mean, expected.outputs_first) < bound);
  CHECK(test::relative_difference(found.column_energy, expected.column_energy) < bound);
  CHECK(found.outputs.weight == static_cast<double>(input.tokens * input.queries));
  // A query that sees one token has weight 0. If all weights are nearly 0, relative differences mean nothing, so the
  // test stops here.
  const double floor = input.scale * input.scale * 1e-12;
  if (test::relative_difference(expected.scored_query, std::vector<double>(expected.scored_query.size())) < floor)
    return;
  CHECK(test::relative_difference(found.scored_query.sum, expected.scored_query) < bound);
  CHECK(test::relative_difference(found.scored_query.mean, expected.scored_query_first) < bound);
  CHECK(found.scored_query.weight == Approx(expected.scored_query_weight).epsilon(bound));
}

}  // namespace

TEST_CASE("Attention moments are those of the definition for every ratio of heads and odd lengths", "[compute]") {
  for (const int queries : {1, 2, 3, 4, 8})
    for (const std::int64_t tokens : {1, 2, 31, 129, 517})
      check(test::random_case({.tokens = tokens, .queries = queries, .dim = 12, .v_dim = 7, .scale = 0.3},
                              static_cast<std::uint64_t>(tokens + queries)),
            1e-5);
}

TEST_CASE("Attention moments see exactly the keys inside a sliding window", "[compute]") {
  for (const std::int64_t tokens : {31, 129, 517})
    for (const int window : {1, 2, 7, 128, 129, 300, 516, 517, 1000})
      check(test::random_case({.tokens = tokens, .queries = 2, .dim = 8, .v_dim = 5, .scale = 0.35, .window = window},
                              static_cast<std::uint64_t>(window)),
            1e-5);
}

TEST_CASE("Attention moments hold for sequences longer than any block of keys, wherever the largest logit lies",
          "[compute]") {
  for (const int window : {0, 1300}) {
    const test::AttentionCase even =
        test::random_case({.tokens = 2311, .queries = 1, .dim = 3, .v_dim = 2, .scale = 0.5, .window = window}, 3, 3.0);
    check(even, 1e-5);
    for (const bool rising : {true, false}) {  // the largest logit moves to the last keys, or stays at the first key
      test::AttentionCase sloped = even;
      for (std::size_t i = 0; i < sloped.k.size(); ++i) {
        const float slope = static_cast<float>(i) / static_cast<float>(sloped.k.size());
        sloped.k[i] *= 4.0f * (rising ? slope : 1.0f - slope);
      }
      check(sloped, 1e-5);
    }
  }
}

TEST_CASE("Attention moments hold for large logits", "[compute]") {
  for (const double logits : {10.0, 50.0})
    for (const int window : {0, 40})
      check(test::random_case({.tokens = 129, .queries = 4, .dim = 64, .v_dim = 32, .scale = 0.125, .window = window},
                              8, logits),
            1e-5);
}

TEST_CASE("Attention moments are those of capped logits and of learned sinks", "[compute]") {
  const std::vector<std::vector<double>> all_sinks = {{}, {-3.0, 1.5}, {15.0, -200.0}};
  for (const double cap : {0.0, 2.0, 30.0})
    for (const std::vector<double>& sinks : all_sinks)
      for (const int window : {0, 40})
        check(test::random_case({.tokens = 129,
                                 .queries = 2,
                                 .dim = 8,
                                 .v_dim = 5,
                                 .scale = 0.35,
                                 .window = window,
                                 .cap = cap,
                                 .sinks = sinks},
                                9, 5.0),
              cap > 0.0 ? 2e-4 : 1e-5);  // the slope of a cap is the difference of nearly equal numbers
}

TEST_CASE("Attention moments hold for keys and values of other sizes, wide ones too", "[compute]") {
  for (const auto& [dim, v_dim] : {std::pair{128, 64}, {64, 128}, {192, 128}, {1, 1}, {3, 256}})
    check(test::random_case({.tokens = 67, .queries = 2, .dim = dim, .v_dim = v_dim, .scale = 0.1},
                            static_cast<std::uint64_t>(dim)),
          1e-5);
}

TEST_CASE("The first query sees itself alone, and such a query costs nothing", "[compute]") {
  const auto input = test::random_case({.tokens = 1, .queries = 3, .dim = 4, .v_dim = 2}, 5);
  const AttentionMoments moments = moments_of(input);
  CHECK(test::relative_difference(moments.column_energy, std::vector<double>{3.0}) < 1e-6);
  CHECK(test::largest_difference(moments.scored_query.sum, std::vector<double>(16, 0.0)) < 1e-10);
  auto windowed = test::random_case({.tokens = 9, .queries = 1, .dim = 4, .v_dim = 2, .window = 1}, 5);
  CHECK(test::relative_difference(moments_of(windowed).column_energy, std::vector<double>(9, 1.0)) < 1e-6);
}

TEST_CASE("The output moment is that of the codec's plain attention", "[compute]") {
  const auto input =
      test::random_case({.tokens = 101, .queries = 1, .dim = 16, .v_dim = 9, .scale = 0.25, .window = 33}, 6, 5.0);
  std::vector<double> out(101 * 9), sum(81), first(9);
  attend(input.q, input.k, input.v, 16, 9, 0.25, 33, out);
  for (std::size_t i = 0; i < 101; ++i) test::add_outer(std::span(out).subspan(i * 9, 9), 1.0, sum, first);
  CHECK(test::relative_difference(moments_of(input).outputs.sum, sum) < 1e-5);
}

TEST_CASE("Sequences add up, and column energy is the last sequence's", "[compute]") {
  const auto first = test::random_case({.tokens = 31, .queries = 2, .dim = 6, .v_dim = 4}, 1);
  const auto second = test::random_case({.tokens = 17, .queries = 2, .dim = 6, .v_dim = 4}, 2);
  AttentionMoments both = empty_moments(first);
  add(first, true, both);
  add(second, true, both);
  both.outputs.symmetrize();
  both.scored_query.symmetrize();
  AttentionMoments sum = moments_of(first);
  const AttentionMoments other = moments_of(second);
  sum.outputs.add(other.outputs);
  sum.scored_query.add(other.scored_query);
  CHECK(test::relative_difference(both.outputs.sum, sum.outputs.sum) < 1e-13);
  CHECK(test::relative_difference(both.scored_query.sum, sum.scored_query.sum) < 1e-13);
  CHECK(both.outputs.weight == 96.0);
  CHECK(both.column_energy == other.column_energy);
}

TEST_CASE("Without the scored query the other moments keep their bits", "[compute]") {
  const auto input = test::random_case({.tokens = 67, .queries = 2, .dim = 8, .v_dim = 8}, 3);
  const AttentionMoments with = moments_of(input), without = moments_of(input, false);
  CHECK(with.outputs.sum == without.outputs.sum);
  CHECK(with.column_energy == without.column_energy);
}

TEST_CASE("Attention moments have the same bits for any number of threads", "[compute]") {
  const auto input =
      test::random_case({.tokens = 1201, .queries = 3, .dim = 16, .v_dim = 8, .scale = 0.25, .window = 700}, 4);
  const auto with_threads = [&](int threads) {
    const ThreadLimit limit(threads);
    return moments_of(input);
  };
  const AttentionMoments one = with_threads(1);
  for (const int threads : {2, 3, 0}) {
    const AttentionMoments many = with_threads(threads);
    CHECK(one.outputs.sum == many.outputs.sum);
    CHECK(one.outputs.mean == many.outputs.mean);
    CHECK(one.scored_query.sum == many.scored_query.sum);
    CHECK(one.column_energy == many.column_energy);
  }
}
