#include <kvq/container/json.h>
#include <kvq/eval/comparison.h>
#include <kvq/eval/metrics.h>

#include "support/error_of.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

using namespace kvq;
using Catch::Matchers::Contains;

namespace {

std::string text_of(const std::string& file) {
  std::ifstream stream(std::string(KVQ_SOURCE_DIR "/") + file);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

std::set<std::string> metric_names() {
  std::set<std::string> names;
  for (const Metric metric : all_metrics()) names.emplace(metric->name);
  return names;
}

std::set<std::string> keys_of(const Json& object) {
  std::set<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.insert(key);
  return keys;
}

/// The lines below a heading of a Markdown file, up to the next heading. `definition` is "<file>#<heading>".
std::string section_of(std::string_view definition) {
  const std::size_t sign = definition.find('#');
  std::istringstream lines(text_of(std::string(definition.substr(0, sign))));
  std::string section, anchor;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("#")) {
      anchor = line.substr(line.find_first_not_of("# "));
      for (char& c : anchor) c = c == ' ' ? '-' : static_cast<char>(std::tolower(c));
    } else if (anchor == definition.substr(sign + 1)) {
      section += line + "\n";
    }
  }
  return section;
}

/// Sums of a part that has everything.
MetricSums all_sums() {
  AttentionSums attention;
  attention.queries = 4.0;
  attention.logit_error = 1.0, attention.logit_energy = 2.0;
  attention.sv_error = 1.0, attention.output_error = 3.0, attention.output_energy = 4.0;
  attention.curved_error = 6.0, attention.divergence = 8.0;
  attention.top_hits = 27.0, attention.top_queries = 3.0;
  attention.context = {.queries = 2.0, .divergence = 3.0, .top_hits = 7.0, .top_queries = 1.0};
  return {
      .k = ErrorSum{1.0, 10.0},
      .v = ErrorSum{1.0, 5.0},
      .attention = attention,
      .projected = ErrorSum{1.0, 8.0},
      .rope_logit_mae = 0.75,
      .tokens = 2.0,
      .has_values = true,
      .has_curvature = true,
  };
}

/// A candidate of one-head layers with these values of the metric, and no other metrics.
CandidateResult candidate(Metric metric, const std::vector<double>& layers, bool with_heads = true) {
  CandidateResult result{.layers = {}, .mean = no_values(), .distributions = {}};
  for (const double value : layers) {
    LayerResult layer{
        .values = no_values(), .distributions = {}, .heads = {no_values()}, .buckets = {}, .rotations = {}};
    layer.values[metric] = value;
    if (with_heads) layer.heads[0][metric] = value;
    result.layers.push_back(std::move(layer));
  }
  return result;
}

}  // namespace

TEST_CASE("Each row of the metrics is whole", "[eval]") {
  std::set<std::string_view> headers;
  CHECK(metric_names().size() == std::size(kMetrics));
  for (const Metric metric : all_metrics()) {
    INFO(metric->name);
    CHECK(headers.insert(metric->header).second);
    CHECK(!metric->summary.empty());
    CHECK(metric->read != nullptr);
    CHECK((metric->per_query != nullptr) == !metric->query_summary.empty());
    CHECK(find_metric(metric->name) == metric);
  }
}

TEST_CASE("The schema of documents has the metrics of the table", "[eval]") {
  const Json schema = parse_json(text_of("formats/eval.schema.json"), "eval.schema.json");
  const Json& definitions = schema.at("definitions");
  std::set<std::string> names = keys_of(definitions.at("values").at("properties"));
  for (const char* part : {"summary", "part"})
    for (const std::string& name : keys_of(definitions.at(part).at("allOf")[1].at("properties"))) names.insert(name);
  CHECK(names == metric_names());
  for (const Metric metric : all_metrics()) {
    INFO(metric->name);
    const std::string name(metric->name);
    const Json& summary = definitions.at("summary").at("allOf")[1].at("properties");
    CHECK(summary.contains(name) == (metric->per_query != nullptr));
    const Json& values = definitions.at("values").at("properties");
    if (!values.contains(name)) continue;
    CHECK((values.at(name).value("better", "less") == "more") == metric->more_is_better);
  }
  CHECK(keys_of(definitions.at("kl").at("properties")).size() == distribution_parts().size());
  for (const DistributionPart& part : distribution_parts())
    CHECK(definitions.at("kl").at("properties").contains(part.name));
}

TEST_CASE("The format defines each metric where the table says", "[eval]") {
  for (const Metric metric : all_metrics()) {
    const std::string section = section_of(metric->definition);
    std::istringstream lines(section);
    bool defined = false;
    for (std::string line; std::getline(lines, line);)
      defined =
          defined || (line.starts_with("- ") &&
                      line.substr(0, line.find(':')).find(fmt::format("`{}`", metric->name)) != std::string::npos);
    INFO(metric->name << " in " << metric->definition);
    CHECK(defined);
  }
}

TEST_CASE("Metrics are read from sums", "[eval]") {
  const Values values = read_values(all_sums());
  CHECK(values[Metric("k_rel_mse")] == 0.1);
  CHECK(values[Metric("v_rel_mse")] == 0.2);
  CHECK(values[Metric("logit_rel_mse")] == 0.5);
  CHECK(values[Metric("rope_logit_mae")] == 0.75);
  CHECK(values[Metric("sv_rel_mse")] == 0.25);
  CHECK(values[Metric("attention_kl")] == 2.0);
  CHECK(values[Metric("top10_overlap")] == 0.9);
  CHECK(values[Metric("attention_kl_b4")] == 1.5);
  CHECK(values[Metric("top10_overlap_b4")] == 0.7);
  CHECK(values[Metric("output_rel_mse")] == 0.75);
  CHECK(values[Metric("o_proj_rel_mse")] == 0.125);
  CHECK(values[Metric("output_nats")] == 3.0);
}

TEST_CASE("A metric without its source has no value", "[eval]") {
  const auto absent = [](const MetricSums& sums) {
    std::string names;
    const Values values = read_values(sums);
    for (const Metric metric : all_metrics())
      if (std::isnan(values[metric])) names += std::string(metric->name) + " ";
    return names;
  };
  CHECK(absent(all_sums()).empty());
  MetricSums sums = all_sums();
  sums.k = sums.v = std::nullopt;
  CHECK(absent(sums) == "k_rel_mse v_rel_mse ");
  sums = all_sums();
  sums.attention = std::nullopt;
  CHECK(absent(sums) ==
        "logit_rel_mse sv_rel_mse attention_kl top10_overlap attention_kl_b4 top10_overlap_b4 "
        "output_rel_mse output_nats ");
  sums = all_sums();
  sums.projected = std::nullopt;
  sums.rope_logit_mae = std::nullopt;
  CHECK(absent(sums) == "rope_logit_mae o_proj_rel_mse ");
  sums = all_sums();
  sums.v = std::nullopt;
  sums.has_values = false;
  CHECK(absent(sums) == "v_rel_mse sv_rel_mse output_rel_mse output_nats ");
  sums = all_sums();
  sums.has_curvature = false;
  sums.attention->top_queries = 0.0;
  CHECK(absent(sums) == "top10_overlap output_nats ");
  sums = all_sums();
  sums.attention->context = {};
  CHECK(absent(sums) == "attention_kl_b4 top10_overlap_b4 ");
}

TEST_CASE("A name that no metric has is refused with all names", "[eval]") {
  const auto error = test::error_of([] { find_metric("kl"); });
  REQUIRE(error);
  CHECK(std::string(error->what()) == "--metric: unknown \"kl\"");
  for (const std::string& name : metric_names()) CHECK_THAT(error->hint(), Contains(name));
}

TEST_CASE("Wins count layers with the better value, in the direction of the metric", "[eval]") {
  for (const char* name : {"output_rel_mse", "top10_overlap"}) {
    const Metric metric = find_metric(name);
    const auto comparisons =
        compare_all({candidate(metric, {1.0, 1.0, 1.0, 1.0}), candidate(metric, {2.0, 3.0, 1.0, 0.5})}, 1);
    REQUIRE(comparisons.size() == 1);
    const Comparison& own = comparisons[0];
    CHECK(own.candidate == 1);
    CHECK(own.metric == metric);
    CHECK(own.layers == 4);
    CHECK(own.wins == (metric->more_is_better ? 2 : 1));
    CHECK(own.losses == (metric->more_is_better ? 1 : 2));
    CHECK(own.change.change == Approx(6.5 / 4.0 - 1.0));
  }
}

TEST_CASE("A comparison skips layers that lack the metric, and takes layers where heads have none", "[eval]") {
  const Metric metric("o_proj_rel_mse");
  const auto comparisons =
      compare_all({candidate(metric, {1.0, kNoValue, 2.0}, false), candidate(metric, {2.0, 5.0, 4.0}, false)}, 1);
  REQUIRE(comparisons.size() == 1);
  CHECK(comparisons[0].layers == 2);
  CHECK(comparisons[0].change.change == 1.0);
  CHECK(compare_all({candidate(metric, {kNoValue}), candidate(metric, {1.0})}, 1).empty());
}

TEST_CASE("A candidate without the metric is not on the front", "[eval]") {
  const Metric metric("output_rel_mse");
  std::vector<CandidateResult> results(3, CandidateResult{.layers = {}, .mean = no_values(), .distributions = {}});
  results[0].bits = 2.0, results[0].mean[metric] = 0.5;
  results[1].bits = 3.0, results[1].mean[metric] = 0.6;
  results[2].bits = 1.0;
  CHECK(on_front(results, metric) == std::vector<bool>{true, false, false});
}

TEST_CASE("More is better on the front of a metric of which more is better", "[eval]") {
  const Metric metric("top10_overlap");
  std::vector<CandidateResult> results(3, CandidateResult{.layers = {}, .mean = no_values(), .distributions = {}});
  results[0].bits = 2.0, results[0].mean[metric] = 0.5;
  results[1].bits = 3.0, results[1].mean[metric] = 0.9;
  results[2].bits = 4.0, results[2].mean[metric] = 0.8;
  CHECK(on_front(results, metric) == std::vector<bool>{true, true, false});
}
