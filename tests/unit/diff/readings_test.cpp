#include <kvq/diff/artifact_readings.h>
#include <kvq/diff/measured_readings.h>
#include <kvq/eval/metrics.h>

#include "support/artifacts.h"
#include "support/dump_writer.h"
#include "support/error_of.h"
#include "support/featured_artifact.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

using namespace kvq;
using Catch::Matchers::Contains;
using test::error_text;

namespace {

std::vector<Reading> readings_of(const std::vector<Reading>& all, const std::string& metric) {
  std::vector<Reading> own;
  std::copy_if(all.begin(), all.end(), std::back_inserter(own),
               [&](const Reading& reading) { return reading.metric == metric; });
  return own;
}

/// Differences by name.
std::map<std::string, std::string> facts_of(const ArtifactDiff& diff) {
  std::map<std::string, std::string> facts;
  for (const Difference& own : diff.differences) facts[own.what] = own.before + " -> " + own.after;
  return facts;
}

double geometry_of(const ArtifactDiff& diff) { return readings_of(diff.readings, "geometry").at(0).after; }

/// A result of one layer with two heads, in which every metric of every part has the value.
CandidateResult result_of(double value) {
  LayerResult layer{.layer = 3, .values = {}, .distributions = {}, .heads = {{}, {}}, .buckets = {}, .rotations = {}};
  CandidateResult result{.layers = {}, .mean = {}, .distributions = {}};
  for (const Metric metric : all_metrics()) {
    layer.values[metric] = result.mean[metric] = value;
    layer.distributions[metric] = result.distributions[metric] = {value, value, value, value, value};
    for (Values& head : layer.heads) head[metric] = value;
  }
  layer.k_code_bits = layer.v_code_bits = 2.0;
  result.layers.push_back(std::move(layer));
  return result;
}

}  // namespace

TEST_CASE("Names of readings are unique, and each can be found", "[diff]") {
  std::set<std::string> names;
  for (const ReadingName& row : reading_names()) {
    INFO(row.name);
    CHECK(names.insert(row.name).second);
    CHECK(find_reading_name(row.name) == &row);
  }
  CHECK(find_reading_name("attention_kl") == nullptr);
  CHECK(!needs_codes("no such metric"));
}

TEST_CASE("Every metric of the table has readings of layers, and of heads where heads have it", "[diff]") {
  for (const Metric metric : all_metrics()) {
    INFO(metric->name);
    const std::string name = std::string(metric->name) + (metric->per_query ? ".mean" : "");
    if (metric->on_request) {  // kvq-diff does not ask for it
      CHECK(find_reading_name(name) == nullptr);
      continue;
    }
    const bool has_heads = metric->source != MetricSource::projection;
    CHECK(find_reading_name(name) != nullptr);
    CHECK(find_reading_name("layers." + name) != nullptr);
    CHECK((find_reading_name("heads." + name) != nullptr) == has_heads);
    CHECK(needs_codes(name) == (metric->source != MetricSource::rope_logits));
    if (!metric->per_query) continue;
    for (const DistributionPart& part : distribution_parts())
      CHECK(find_reading_name(fmt::format("layers.{}.{}", metric->name, part.name)) != nullptr);
  }
}

TEST_CASE("Equal artifacts have no differences and only distances of 0", "[diff]") {
  for (const Artifact& artifact : {test::example_artifact(), test::featured_artifact()}) {
    const ArtifactDiff diff = diff_artifacts(artifact, artifact);
    CHECK(diff.differences.empty());
    CHECK(!geometries_differ(diff));
    for (const Reading& reading : diff.readings) {
      INFO(reading.metric << " at " << reading.where);
      const ReadingName* row = find_reading_name(reading.metric);
      REQUIRE(row != nullptr);
      CHECK(row->distance == !reading.before.has_value());
      if (reading.before)
        CHECK(*reading.before == reading.after);
      else if (reading.metric == "allocation.high_bit_jaccard")
        CHECK(reading.after == 1.0);
      else if (reading.metric != "orthogonality")  // of the new artifact alone
        CHECK(reading.after == Approx(0.0).margin(1e-4));
    }
  }
}

TEST_CASE("Facts of the model count as geometry", "[diff]") {
  const Artifact before = test::example_artifact();
  Artifact after = before;
  after.layers[0].geometry.sliding_window += 7;
  after.layers[0].geometry.rope.attention_factor += 0.5;
  after.model.name = "another";
  after.model.fingerprint.clear();
  const ArtifactDiff diff = diff_artifacts(before, after);
  CHECK(geometries_differ(diff));
  CHECK(geometry_of(diff) == 4.0);
  CHECK(readings_of(diff.readings, "geometry").at(0).where == "model name");
  const auto facts = facts_of(diff);
  CHECK(facts.contains("layer 0 sliding_window"));
  CHECK(facts.contains("layer 0 rope_attention_factor"));
  CHECK(facts.contains("model name"));
}

TEST_CASE("A name alone does not make another model of one fingerprint", "[diff]") {
  Artifact before = test::example_artifact();
  before.model.fingerprint = std::string(64, 'a');
  Artifact after = before;
  after.model.name = "a folder";
  const ArtifactDiff diff = diff_artifacts(before, after);
  CHECK_FALSE(geometries_differ(diff));
  CHECK(facts_of(diff).contains("model name"));
  CHECK(readings_of(diff.readings, "windows").at(0).after == 0.0);
}

TEST_CASE("A layer that only one artifact has is a difference of geometry", "[diff]") {
  const Artifact before = test::example_artifact();
  Artifact after = before;
  after.layers.pop_back();
  const ArtifactDiff diff = diff_artifacts(before, after);
  CHECK(facts_of(diff).at("layers") == "0 1 4 -> 0 1");
  CHECK(geometry_of(diff) == 1.0);
  CHECK(readings_of(diff.readings, "layers.bytes_per_token").size() == 2);
}

TEST_CASE("Windows, options and codes are named, and are no geometry", "[diff]") {
  const Artifact before = test::example_artifact();
  Artifact after = before;
  after.windows.sink_tokens += 16;
  after.calibration.options["bits"] = 9;
  after.layers[0].v = TensorPlan{};
  const ArtifactDiff diff = diff_artifacts(before, after);
  const auto facts = facts_of(diff);
  CHECK(!geometries_differ(diff));
  CHECK(facts.at("windows") == "64 sink, 256 recent -> 80 sink, 256 recent");
  CHECK(facts.contains("layer 0 v codes"));
  CHECK(std::any_of(facts.begin(), facts.end(), [](const auto& own) { return own.first.starts_with("options"); }));
  CHECK(readings_of(diff.readings, "windows").at(0).after == 1.0);
  CHECK(readings_of(diff.readings, "codes").at(0).after >= 1.0);
}

TEST_CASE("Another search of a trellis has other codes", "[diff]") {
  Artifact before = test::example_artifact();
  TensorPlan& plan = before.layers[0].k;
  plan = TensorPlan{};
  plan.coder = TrellisCoder{.bits = 2, .group_size = 8, .taps = {{.bits = 2, .memory = 1, .theta = {1, 2, 3, 4}}}};
  Artifact after = before;
  std::get<TrellisCoder>(after.layers[0].k.coder).taps[0].search = TrellisSearch::integer;
  const std::string change = facts_of(diff_artifacts(before, after)).at("layer 0 k codes");
  CHECK_THAT(change, Contains("trellis m1 (search binary32)"));
  CHECK_THAT(change, Contains("-> 2-bit trellis m1 g8"));
}

TEST_CASE("Changed widths are distances of layers and heads", "[diff]") {
  const Artifact before = test::featured_artifact();
  Artifact after = before;
  bool changed = false;
  for (LayerPlan& layer : after.layers)
    if (!changed && layer.k.allocation && !layer.k.allocation->block_bits.empty()) {
      std::uint8_t& bits = layer.k.allocation->block_bits[0];
      bits = static_cast<std::uint8_t>(bits == 2 ? 3 : 2);
      changed = true;
    }
  REQUIRE(changed);
  const ArtifactDiff diff = diff_artifacts(before, after);
  CHECK(readings_of(diff.readings, "allocation.hamming").at(0).after > 0.0);
  const auto heads = readings_of(diff.readings, "heads.allocation.hamming");
  CHECK(std::count_if(heads.begin(), heads.end(), [](const Reading& own) { return own.after > 0.0; }) == 1);
}

TEST_CASE("Measured readings name each metric of means, layers and heads", "[diff]") {
  const CandidateResult result = result_of(0.5);
  const std::vector<Reading> readings = diff_results(result, result, result, false);
  for (const Reading& reading : readings) {
    INFO(reading.metric);
    CHECK(reading.after == 0.5);
    CHECK(reading.before == 0.5);
    CHECK(!reading.resized);
    const ReadingName* row = find_reading_name(reading.metric);
    const bool is_head_of_o_proj = reading.metric == "heads.o_proj_rel_mse";  // heads of a dump do not have it
    CHECK((row != nullptr && row->measured) == !is_head_of_o_proj);
  }
  CHECK(readings_of(readings, "attention_kl.p99").size() == 1);
  CHECK(readings_of(readings, "layers.attention_kl.max").at(0).where == "layer 3");
  CHECK(readings_of(readings, "heads.attention_kl.mean").at(1).where == "layer 3 head 1");
}

TEST_CASE("A metric that exact rows do not have has no reading", "[diff]") {
  CandidateResult exact = result_of(0.0);
  const Metric output("output_rel_mse");
  exact.mean[output] = exact.layers[0].values[output] = exact.layers[0].heads[0][output] = kNoValue;
  const std::vector<Reading> readings = diff_results(result_of(1.0), result_of(1.0), exact, false);
  CHECK(readings_of(readings, "output_rel_mse").empty());
  CHECK(readings_of(readings, "layers.output_rel_mse").empty());
  CHECK(readings_of(readings, "heads.output_rel_mse").size() == 1);
}

TEST_CASE("A NaN of one layer makes the mean NaN", "[diff]") {
  CandidateResult after = result_of(1.0);
  after.layers[0].values[Metric("v_rel_mse")] = kNoValue;
  const std::vector<Reading> readings = diff_results(result_of(1.0), after, result_of(0.0), false);
  CHECK(std::isnan(readings_of(readings, "v_rel_mse").at(0).after));
  CHECK(readings_of(readings, "k_rel_mse").at(0).after == 1.0);
}

TEST_CASE("If logits are not finite, metrics of weights are NaN", "[diff]") {
  CandidateResult after = result_of(1.0);
  after.layers[0].values[Metric("logit_rel_mse")] = HUGE_VAL;
  const std::vector<Reading> readings = diff_results(result_of(1.0), after, result_of(0.0), false);
  for (const char* metric : {"layers.attention_kl.mean", "layers.attention_kl.p99", "layers.top10_overlap"})
    CHECK(std::isnan(readings_of(readings, metric).at(0).after));
  CHECK(readings_of(readings, "layers.output_rel_mse").at(0).after == 1.0);
}

TEST_CASE("With budgets, readings of layers with other code bits are resized", "[diff]") {
  CandidateResult after = result_of(1.0);
  after.layers[0].k_code_bits = 3.0;
  for (const bool budgets : {false, true})
    for (const Reading& reading : diff_results(result_of(1.0), after, result_of(0.0), budgets))
      CHECK(reading.resized == (budgets && !reading.where.empty()));
}

TEST_CASE("Nothing is coded if exact windows hold all tokens", "[diff]") {
  CHECK(nothing_coded(result_of(0.0)));
  CHECK(!nothing_coded(result_of(0.1)));
  CandidateResult exact = result_of(0.0);
  exact.layers[0].k_code_bits = exact.layers[0].v_code_bits = 16.0;
  CHECK(!nothing_coded(exact));
}

TEST_CASE("A dump without the layers of both artifacts is refused", "[diff]") {
  const test::TempFolder folder;
  test::write_dump(folder / "dump.h5", test::random_dump({.layers = {5}, .num_layers = 6}));
  const Dump dump = Dump::open({folder / "dump.h5"});
  const DiffFile file{"a.safetensors", test::example_artifact()};
  CHECK_THAT(error_text([&] { measure_diff(dump, file, file, {.layers = {}}, [](double, const std::string&) {}); }),
             Contains("bad_input: the dump has none of the layers of both artifacts"));
}
