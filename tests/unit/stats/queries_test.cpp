#include <kvq/dump/keep_tokens.h>
#include <kvq/stats/collect.h>
#include <kvq/stats/shards.h>
#include <kvq/stats/stats_file.h>

#include "support/compare.h"
#include "support/container_edit.h"
#include "support/error_of.h"
#include "support/layers.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

// --queries: whose queries count in moments.

using namespace kvq;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

namespace {

/// Moments that are sums over queries.
const std::set<Moment> kOfQueries = {Moment::query, Moment::scored_value, Moment::scored_query};

/// A layer whose last tokens of each sequence are generated, `prompt` of them not.
LayerActivations marked_layer(test::LayerSpec spec, std::int64_t prompt) {
  LayerActivations layer = test::make_layer(spec);
  for (const std::int64_t length : spec.lengths)
    for (std::int64_t t = 0; t < length; ++t) layer.generated.push_back(t >= prompt ? 1 : 0);
  return layer;
}

LayerStats of_queries(const LayerActivations& layer, Queries queries, std::int64_t held_out = 0) {
  std::set<Moment> moments = test::all_moments(layer.v.has_value());
  moments.erase(Moment::sst);
  return collect(layer, {.moments = moments, .queries = queries, .sample_tokens = 20, .held_out_tokens = held_out});
}

void check_sum(const LayerStats& all, const LayerStats& a, const LayerStats& b) {
  for (const Moment which : kOfQueries) {
    if (!all.moments.contains(which)) continue;
    for (std::size_t head = 0; head < all.moment(which).size(); ++head) {
      INFO(to_string(which) << ", head " << head);
      MomentSum sum = a.moment(which)[head];
      sum.add(b.moment(which)[head]);
      CHECK(test::relative_difference(sum.sum, all.moment(which)[head].sum) < 1e-6);
      CHECK(test::relative_difference(sum.mean, all.moment(which)[head].mean) < 1e-6);
      CHECK(sum.weight == all.moment(which)[head].weight);
    }
  }
  for (std::size_t i = 0; i < all.sample.value_weight.size(); ++i)
    CHECK(a.sample.value_weight[i] + b.sample.value_weight[i] == Approx(all.sample.value_weight[i]).epsilon(1e-5));
}

StatsHeader header_with(Queries queries) {
  return {.model = {.name = "m", .fingerprint = "", .config_json = "", .num_layers = 1, .layers = {}},
          .producer = "p",
          .capture_point = "post_rope",
          .sample_tokens = 20,
          .queries = queries};
}

}  // namespace

TEST_CASE("Moments of all queries are those of generated and of prompt queries together", "[stats]") {
  for (const test::LayerSpec& spec :
       {test::LayerSpec{},
        test::LayerSpec{.num_q_heads = 6, .num_kv_heads = 3, .lengths = {301, 20}, .dtype = DType::bf16},
        test::LayerSpec{.lengths = {40, 31}, .sliding_window = 7}, test::LayerSpec{.has_values = false}})
    for (const std::int64_t held_out : {0, 10}) {
      CAPTURE(spec.lengths, spec.sliding_window, held_out);
      const LayerActivations layer = marked_layer(spec, 12);
      const LayerStats all = of_queries(layer, Queries::all, held_out),
                       generated = of_queries(layer, Queries::generated, held_out),
                       prompt = of_queries(layer, Queries::prompt, held_out);
      check_sum(all, generated, prompt);
      CHECK(generated.moment(Moment::key)[0].sum == all.moment(Moment::key)[0].sum);
      CHECK(generated.tokens == all.tokens);
    }
}

TEST_CASE("Prompt queries are those of the dump that ends with the prompt, because attention is causal", "[stats]") {
  const test::LayerSpec spec{.lengths = {61}};
  const LayerActivations whole = marked_layer(spec, 23);
  LayerActivations prompt = whole;
  keep_tokens(prompt, 0, 23);
  const LayerStats found = of_queries(whole, Queries::prompt), expected = of_queries(prompt, Queries::all);
  for (const Moment which : kOfQueries)
    for (std::size_t head = 0; head < 2; ++head) {
      INFO(to_string(which));
      CHECK(test::relative_difference(found.moment(which)[head].sum, expected.moment(which)[head].sum) < 1e-6);
      CHECK(found.moment(which)[head].weight == expected.moment(which)[head].weight);
    }
  CHECK(found.moment(Moment::key)[0].weight == 61.0);
}

TEST_CASE("Queries that the dump cannot tell apart, or does not have, are refused by name", "[stats]") {
  const StatsRequest generated{.moments = {Moment::query}, .queries = Queries::generated, .sample_tokens = 4};
  const auto refusal = [&](const LayerActivations& layer, const StatsRequest& request) {
    return test::error_text([&] { collect(layer, request); });
  };
  CHECK_THAT(refusal(test::make_layer({.layer = 3}), generated),
             StartsWith("usage: ") && Contains("layer 3") && Contains("--queries generated") && Contains("/generated"));
  CHECK_THAT(refusal(marked_layer({}, 100), generated), Contains("--queries generated") && Contains("none of the 45"));
  CHECK_THAT(refusal(marked_layer({}, 0), {.moments = {Moment::key}, .queries = Queries::prompt, .sample_tokens = 4}),
             Contains("--queries prompt"));
}

TEST_CASE("Statistics say whose queries they hold, and do not merge with those of others", "[stats]") {
  const test::TempFolder folder;
  const LayerActivations layer = marked_layer({.lengths = {30, 31}}, 12);
  const auto save = [&](Queries queries, std::size_t sequence) {
    const std::filesystem::path path = folder / fmt::format("{}-{}", to_string(queries), sequence);
    save_stats(header_with(queries),
               std::vector<LayerStats>{of_queries(test::keep_sequences(layer, sequence, 1), queries)}, path);
    return path;
  };
  for (const Queries queries : kAllQueries) {
    const StatsFile file = StatsFile::open(save(queries, 0));
    CHECK(file.header().queries == queries);
    const Json manifest = test::EditableFile::read(folder / fmt::format("{}-0", to_string(queries))).manifest;
    CHECK(manifest.contains("queries") == (queries != Queries::all));
    CHECK(manifest.at("version") == "1.5");  // because the ranges of tokens are stated
    CHECK(manifest.at("requires").empty() == (queries == Queries::all));
    merge_stats_files({save(queries, 0), save(queries, 1)}, folder / "both");
    CHECK(StatsFile::open(folder / "both").header().queries == queries);
  }
  CHECK_THAT(test::error_text(
                 [&] { merge_stats_files({save(Queries::generated, 0), save(Queries::all, 1)}, folder / "mixed"); }),
             StartsWith("bad_input: ") && Contains("queries: expected generated") && Contains("found all"));
}

TEST_CASE("Choices of queries are called what the format calls them", "[stats]") {
  for (const Queries queries : kAllQueries) CHECK(queries_from_string(to_string(queries)) == queries);
  CHECK(queries_from_string("decode") == std::nullopt);
}
