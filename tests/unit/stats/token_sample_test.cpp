#include <kvq/core/random.h>
#include <kvq/stats/collect.h>
#include <kvq/stats/token_sample.h>

#include "support/compare.h"
#include "support/layers.h"
#include "support/naive_stats.h"

#include <catch2/catch.hpp>

#include <xxhash.h>

#include <algorithm>
#include <set>

using namespace kvq;

namespace {

bool same_rows(const SampledRows& a, const SampledRows& b) {
  return a.dtype == b.dtype && a.heads == b.heads && a.dim == b.dim && a.raw == b.raw;
}

void check_equal(const TokenSample& a, const TokenSample& b) {
  CHECK(a.key == b.key);
  CHECK(a.token == b.token);
  CHECK(same_rows(a.q, b.q));
  CHECK(same_rows(a.k, b.k));
  CHECK(same_rows(a.v, b.v));
  CHECK(a.value_weight == b.value_weight);
}

/// The sampling key by formats/stats.md, "Sample": the top 63 bits of the first two words.
std::int64_t expected_key(const LayerActivations& layer, std::size_t sequence, std::int64_t index, std::uint64_t seed) {
  const auto row = static_cast<std::int64_t>(size_of(layer.k.dtype)) * layer.k.heads * layer.k.dim;
  const std::int64_t first = layer.cu_seqlens[sequence], count = layer.cu_seqlens[sequence + 1] - first;
  const std::uint64_t hash = XXH3_64bits(layer.k.raw.data() + first * row, static_cast<std::size_t>(count * row));
  const auto words = philox({static_cast<std::uint32_t>(hash), static_cast<std::uint32_t>(hash >> 32),
                             static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(layer.layer)},
                            {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  return static_cast<std::int64_t>(((std::uint64_t{words[0]} << 32) | words[1]) >> 1);
}

}  // namespace

TEST_CASE("The sample holds the tokens of smallest key, and keys are those of the format", "[stats]") {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{0x123456789abcdef0}}) {
      const LayerActivations layer = test::make_layer({.layer = 5, .lengths = {13, 1, 31}, .dtype = dtype});
      std::vector<std::pair<std::int64_t, std::int64_t>> all;
      for (std::size_t s = 0; s < 3; ++s)
        for (std::int64_t t = layer.cu_seqlens[s]; t < layer.cu_seqlens[s + 1]; ++t)
          all.emplace_back(expected_key(layer, s, t - layer.cu_seqlens[s], seed), t);
      std::sort(all.begin(), all.end());
      const TokenSample sample = sample_tokens(layer, seed, 17);
      REQUIRE(sample.size() == 17);
      for (std::size_t i = 0; i < 17; ++i) {
        CHECK(sample.key[i] == all[i].first);
        CHECK(sample.token[i] == all[i].second);
      }
    }
}

TEST_CASE("A sample holds the rows of its tokens as the dump has them", "[stats]") {
  const LayerActivations layer = test::make_layer({.dtype = DType::f16});
  const TokenSample sample = sample_tokens(layer, 1, 20);
  CHECK(sample.k.dtype == DType::f16);
  for (int head = 0; head < 2; ++head) {
    const std::vector<float> keys = sample.k.head(head), values = sample.v.head(head),
                             queries = sample.q.head(head + 2);
    for (std::size_t i = 0; i < 20; ++i) {
      std::vector<float> k(16), v(12), q(16);
      layer.k.load_head(head, sample.token[i], 1, k.data());
      layer.v->load_head(head, sample.token[i], 1, v.data());
      layer.q.load_head(head + 2, sample.token[i], 1, q.data());
      CHECK(std::equal(k.begin(), k.end(), keys.begin() + static_cast<std::ptrdiff_t>(i * 16)));
      CHECK(std::equal(v.begin(), v.end(), values.begin() + static_cast<std::ptrdiff_t>(i * 12)));
      CHECK(std::equal(q.begin(), q.end(), queries.begin() + static_cast<std::ptrdiff_t>(i * 16)));
    }
  }
}

TEST_CASE("A sample is the same every time, depends on the seed and takes all tokens if there are few", "[stats]") {
  const LayerActivations layer = test::make_layer({});
  check_equal(sample_tokens(layer, 7, 20), sample_tokens(layer, 7, 20));
  CHECK(sample_tokens(layer, 7, 20).token != sample_tokens(layer, 8, 20).token);
  const TokenSample all = sample_tokens(layer, 7, 1000);
  CHECK(all.size() == 45);
  CHECK(std::set<std::int64_t>(all.token.begin(), all.token.end()).size() == 45);
  CHECK(std::is_sorted(all.key.begin(), all.key.end()));
  CHECK(all.key.front() >= 0);
}

TEST_CASE("A token's key depends on its sequence alone", "[stats]") {
  const LayerActivations layer = test::make_layer({.lengths = {13, 7, 31}});
  const TokenSample all = sample_tokens(layer, 3, 1000);
  for (std::size_t s = 0; s < 3; ++s) {
    const TokenSample alone = sample_tokens(test::keep_sequences(layer, s, 1), 3, 1000);
    for (std::size_t i = 0; i < alone.key.size(); ++i) {
      const auto found = std::find(all.key.begin(), all.key.end(), alone.key[i]);
      REQUIRE(found != all.key.end());
      CHECK(all.token[static_cast<std::size_t>(found - all.key.begin())] == alone.token[i] + layer.cu_seqlens[s]);
    }
  }
}

TEST_CASE("The sample of a union is the smallest of the samples, equal sequences included", "[stats]") {
  LayerActivations layer = test::make_layer({.lengths = {13, 7, 13}});
  const std::size_t row =
      layer.k.raw.size() / 33;  // the third sequence repeats the keys of the first: equal sampling keys
  std::copy_n(layer.k.raw.begin(), 13 * row, layer.k.raw.begin() + static_cast<std::ptrdiff_t>(20 * row));
  for (const std::int64_t count : {1, 5, 20, 33, 100}) {
    const TokenSample joint = sample_tokens(layer, 2, count);
    for (const std::size_t cut : {1u, 2u}) {
      const TokenSample a = sample_tokens(test::keep_sequences(layer, 0, cut), 2, count),
                        b = sample_tokens(test::keep_sequences(layer, cut, 3 - cut), 2, count);
      INFO("count " << count << ", cut before sequence " << cut);
      check_equal(merge_samples(a, b, layer.cu_seqlens[cut], count), joint);
    }
  }
}

TEST_CASE("Shards stored in different types meet in float32", "[stats]") {
  const TokenSample half = sample_tokens(test::make_layer({.lengths = {13}, .dtype = DType::bf16}), 2, 8);
  const TokenSample full = sample_tokens(test::make_layer({.lengths = {9}, .seed = 5}), 2, 8);
  const TokenSample merged = merge_samples(half, full, 13, 16);
  CHECK(merged.k.dtype == DType::f32);
  REQUIRE(merged.size() == 16);
  for (std::size_t i = 0; i < 16; ++i) {
    const bool second = merged.token[i] >= 13;
    const TokenSample& source = second ? full : half;
    const auto at =
        std::find(source.token.begin(), source.token.end(), merged.token[i] - (second ? 13 : 0)) - source.token.begin();
    CHECK(merged.key[i] == source.key[static_cast<std::size_t>(at)]);
    for (const auto member : {&TokenSample::q, &TokenSample::k, &TokenSample::v}) {
      const std::vector<float> found = (merged.*member).head(1), expected = (source.*member).head(1);
      const auto dim = (merged.*member).dim;
      CHECK(std::equal(found.begin() + static_cast<std::ptrdiff_t>(i) * dim,
                       found.begin() + static_cast<std::ptrdiff_t>(i + 1) * dim, expected.begin() + at * dim));
    }
  }
}

TEST_CASE("Value weights are the attention that a token's value gets", "[stats]") {
  const LayerActivations layer = test::make_layer({.lengths = {13, 1, 31}, .sliding_window = 9});
  const LayerStats stats = collect(layer, {.moments = {Moment::scored_value}, .sample_tokens = 30});
  for (int head = 0; head < 2; ++head) {
    const std::vector<double> energy = test::naive_value_weight(layer, head);
    const std::vector<float> weights = stats.sample.weights(head, 2);
    std::vector<double> expected;
    for (const std::int64_t token : stats.sample.token) expected.push_back(energy[static_cast<std::size_t>(token)]);
    CHECK(test::relative_difference(weights, expected) < 1e-5);
  }
  const LayerStats without = collect(layer, {.moments = {Moment::value}, .sample_tokens = 30});
  CHECK(without.sample.weights(1, 2) == std::vector<float>(30, 1.0f));
}

TEST_CASE("A layer without values has a sample without value rows", "[stats]") {
  const TokenSample sample = sample_tokens(test::make_layer({.has_values = false}), 0, 10);
  CHECK(sample.v.heads == 0);
  CHECK(sample.v.raw.empty());
  CHECK(sample.k.heads == 2);
}
