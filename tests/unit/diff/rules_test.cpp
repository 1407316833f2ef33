#include <kvq/diff/rules.h>

#include "support/error_of.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

using namespace kvq;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;
using test::error_text;

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Reading level(const std::string& metric, double before, double after) { return {metric, "", before, after}; }
Reading distance(const std::string& metric, double after) { return {metric, "", {}, after}; }

CheckResult check(const std::string& rule, const std::vector<Reading>& readings) {
  return check_rules({parse_rule(rule)}, readings, false).at(0);
}
bool holds(const std::string& rule, const Reading& reading) {
  const CheckResult result = check(rule, {reading});
  CHECK(result.readings == 1);
  return result.outcome == Outcome::passed;
}

}  // namespace

TEST_CASE("A rule is a metric, an operator and a limit", "[diff]") {
  const Rule absolute = parse_rule("clip<=0.05");
  CHECK(absolute.text == "clip<=0.05");
  CHECK(absolute.metric == "clip");
  CHECK(absolute.at_most);
  CHECK(!absolute.relative);
  CHECK(absolute.limit == 0.05);
  CHECK(!absolute.demanded);
  const Rule relative = parse_rule("top10_overlap>=-2%");
  CHECK(!relative.at_most);
  CHECK(relative.relative);
  CHECK(relative.limit == -0.02);
  CHECK(parse_rule("layers.attention_kl.p99<=+5%").limit == 0.05);
  CHECK(parse_rule("heads.v_rel_mse<=1e-3").limit == 1e-3);
}

TEST_CASE("A text that is no rule is refused with the text", "[diff]") {
  for (const char* text : {"", "clip", "clip<0.05", "clip=0.05", "clip==0.05", "clip<", "<"})
    CHECK_THAT(error_text([&] { parse_rule(text); }),
               StartsWith("usage: --fail-on \"" + std::string(text)) && Contains("expected <= or >="));
  for (const char* limit : {"", "%", "x", "5 ", "5%%", "+", "++5", "nan", "inf", "1e999"})
    CHECK_THAT(error_text([&] { parse_rule("clip<=" + std::string(limit)); }), Contains("expected a number, found"));
  for (const char* name : {"", "Clip", "clip ", "attention_kl", "heads.o_proj_rel_mse", "heads.attention_kl.p99"})
    CHECK_THAT(error_text([&] { parse_rule(std::string(name) + "<=1"); }),
               Contains("there is no metric \"" + std::string(name) + "\""));
}

TEST_CASE("A percentage of a distance is refused, because a distance has no old value", "[diff]") {
  CHECK_THAT(error_text([] { parse_rule("clip<=5%"); }), Contains("clip is a distance") && Contains("clip<=0.05"));
  CHECK_THAT(error_text([] { parse_rule("codes>=5%"); }), Contains("codes>=0.05"));
}

TEST_CASE("Long and unprintable rules are shortened in errors", "[diff]") {
  const auto error = test::error_of([] { parse_rule(std::string(500, 'x') + "\n\x01"); });
  REQUIRE(error);
  CHECK(std::string(error->what()).size() < 200);
  CHECK(std::string(error->what()).find('\n') == std::string::npos);
  CHECK_THAT(error->hint(), Contains("METRIC<=LIMIT"));
}

TEST_CASE("An absolute limit holds for the new value, the limit included", "[diff]") {
  CHECK(holds("clip<=0.05", distance("clip", 0.05)));
  CHECK(!holds("clip<=0.05", distance("clip", 0.0500001)));
  CHECK(holds("effective_bits>=2", level("effective_bits", 9.0, 2.0)));
  CHECK(!holds("effective_bits>=2", level("effective_bits", 9.0, 1.999)));
}

TEST_CASE("A relative limit holds for the change from the old value", "[diff]") {
  CHECK(holds("output_rel_mse<=+5%", level("output_rel_mse", 2.0, 2.1)));
  CHECK(!holds("output_rel_mse<=+5%", level("output_rel_mse", 2.0, 2.11)));
  CHECK(holds("output_rel_mse<=-5%", level("output_rel_mse", 2.0, 1.9)));
  CHECK(!holds("output_rel_mse<=-5%", level("output_rel_mse", 2.0, 2.0)));
  CHECK(holds("top10_overlap>=-2%", level("top10_overlap", 1.0, 0.98)));
  CHECK(!holds("top10_overlap>=-2%", level("top10_overlap", 1.0, 0.97)));
}

TEST_CASE("Every change from an old value of 0 is beyond a relative limit", "[diff]") {
  CHECK(holds("output_rel_mse<=+5%", level("output_rel_mse", 0.0, 0.0)));
  CHECK(!holds("output_rel_mse<=+5%", level("output_rel_mse", 0.0, 1e-9)));
  CHECK(holds("output_rel_mse>=-5%", level("output_rel_mse", 0.0, 1e-9)));
}

TEST_CASE("A number that is not finite breaks every rule", "[diff]") {
  for (const double bad : {kNaN, HUGE_VAL, -HUGE_VAL})
    for (const char* rule : {"output_rel_mse<=1", "output_rel_mse>=-1", "output_rel_mse<=+5%", "output_rel_mse>=-5%"}) {
      INFO(rule << ", " << bad);
      CHECK(!holds(rule, level("output_rel_mse", 1.0, bad)));
      CHECK(std::isnan(check(rule, {level("output_rel_mse", 1.0, bad)}).margin));
    }
  CHECK(!holds("output_rel_mse<=+5%", level("output_rel_mse", kNaN, 1.0)));
  CHECK(holds("output_rel_mse<=1", level("output_rel_mse", kNaN, 1.0)));
}

TEST_CASE("The worst reading is kept, and failures are counted", "[diff]") {
  const CheckResult result = check(
      "clip<=0.5", {distance("clip", 0.4), distance("center", 9.0), distance("clip", 0.9), distance("clip", 0.7)});
  CHECK(result.outcome == Outcome::failed);
  CHECK(result.readings == 3);
  CHECK(result.failures == 2);
  CHECK(result.worst.after == 0.9);
  CHECK(result.margin == Approx(0.4));
  CHECK(check("clip<=0.5", {distance("clip", 0.1), distance("clip", 0.3)}).worst.after == 0.3);
}

TEST_CASE("Readings that a budget resized are not judged", "[diff]") {
  Reading reading = level("layers.output_rel_mse", 1.0, 9.0);
  reading.resized = true;
  const CheckResult result = check("layers.output_rel_mse<=+5%", {reading});
  CHECK(result.readings == 0);
  CHECK(result.outcome == Outcome::skipped);
}

TEST_CASE("A rule without readings is skipped, but fails if it was demanded or nothing was coded", "[diff]") {
  Rule rule = parse_rule("output_rel_mse<=1");
  CHECK(check_rules({rule}, {}, false).at(0).outcome == Outcome::skipped);
  CHECK(check_rules({rule}, {}, true).at(0).outcome == Outcome::failed);
  CHECK(check_rules({parse_rule("rope_logit_mae<=1"), parse_rule("clip<=1")}, {}, true).at(0).outcome ==
        Outcome::skipped);
  rule.demanded = true;
  CHECK(check_rules({rule}, {}, false).at(0).outcome == Outcome::failed);
}

TEST_CASE("Own rules take the place of the default rules of their metric", "[diff]") {
  const std::vector<Rule> own = {parse_rule("clip<=0.9"), parse_rule("clip>=0"), parse_rule("rotation.angle<=1")};
  const std::vector<Rule> rules = choose_rules(own, true, {});
  CHECK(rules.size() == default_rules().size() - 1 + own.size());
  CHECK(std::count_if(rules.begin(), rules.end(), [](const Rule& rule) { return rule.metric == "clip"; }) == 2);
  CHECK(rules.back().text == "rotation.angle<=1");
  CHECK(choose_rules(own, false, {}).size() == own.size());
  CHECK(choose_rules({}, true, {}).size() == default_rules().size());
}

TEST_CASE("Rules that follow the data are left out where attention on other data is measured", "[diff]") {
  const auto names = [](Evidence evidence) {
    std::vector<std::string> metrics;
    for (const Rule& rule : choose_rules({}, true, evidence)) metrics.push_back(rule.metric);
    return metrics;
  };
  const auto has = [](const std::vector<std::string>& all, const char* metric) {
    return std::find(all.begin(), all.end(), metric) != all.end();
  };
  const auto other = names({.measured = true, .same_data = false});
  for (const char* metric : {"rotation.covariance", "layers.calibration_error", "heads.v_rel_mse"})
    CHECK(!has(other, metric));
  for (const char* metric : {"geometry", "codes", "rotation.factor", "clip", "output_rel_mse", "heads.logit_rel_mse"})
    CHECK(has(other, metric));
  for (const Evidence evidence : {Evidence{true, true}, Evidence{false, false}, Evidence{false, true}})
    CHECK(names(evidence).size() == default_rules().size());
  const Rule own = parse_rule("rotation.covariance<=0.1");
  CHECK(choose_rules({own}, true, {.measured = true, .same_data = false}).back().metric == "rotation.covariance");
}
