#include <kvq/codec/codec.h>

#include "support/compare.h"
#include "support/naive_attention.h"

#include <catch2/catch.hpp>

using namespace kvq;

namespace {

std::vector<double> attended(const test::AttentionCase& input) {
  std::vector<double> out(static_cast<std::size_t>(input.tokens * input.v_dim));
  attend(input.q, input.k, input.v, input.dim, input.v_dim, input.scale, input.window, out);
  return out;
}

}  // namespace

TEST_CASE("Attention is the causal softmax of the definition, with and without a window", "[codec]") {
  for (const std::int64_t tokens : {1, 2, 31, 67})
    for (const int window : {0, 1, 2, 7, 31, 100})
      for (const double logits : {1.0, 50.0}) {
        const auto input = test::random_case({.tokens = tokens, .dim = 6, .v_dim = 5, .scale = 0.3, .window = window},
                                             static_cast<std::uint64_t>(tokens * 1000 + window), logits);
        INFO(tokens << " tokens, window " << window << ", logits of " << logits);
        CHECK(test::relative_difference(attended(input), test::attention_output(input, 0)) < 1e-12);
      }
}

TEST_CASE("Logits far beyond the range of exp do no harm", "[codec]") {
  test::AttentionCase input{
      .tokens = 3,
      .dim = 1,
      .v_dim = 1,
      .scale = 1.0,
      .q = {1000, 1000, 1000},
      .k = {1000, -1000, 999},
      .v = {1, 2, 3},
  };
  CHECK(test::largest_difference(attended(input), std::vector<double>{1, 1, 1}) == 0.0);
  input.k = {-1000, -1000, -1000};
  CHECK(test::largest_difference(attended(input), std::vector<double>{1, 1.5, 2}) < 1e-14);
}
