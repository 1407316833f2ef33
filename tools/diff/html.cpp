#include "diff/html.h"

#include "diff/words.h"
#include "report/heat_map.h"
#include "report/line_chart.h"
#include "report/page.h"
#include "report/svg.h"
#include "report/text.h"

#include <kvq/eval/metrics.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <optional>
#include <set>

namespace kvq {

namespace {

constexpr int kNewStyle = 0;
constexpr std::string_view kLayers = "layers.", kHeads = "heads.";

/// Readings of a metric that have an old and a new value, by layer or by layer and head.
struct Series {
  std::map<int, Reading> layers = {};
  std::map<std::pair<int, int>, Reading> heads = {};  ///< by layer and KV head
};

/// Readings of each metric "layers.<metric>" and "heads.<metric>", in the order of the report.
std::vector<std::pair<std::string, Series>> series_of(const DiffReport& report) {
  std::vector<std::pair<std::string, Series>> all;
  for (const Reading& reading : report.diff.readings) {
    if (!reading.before) continue;
    int layer = 0, head = 0, end = 0;
    const bool by_head = reading.metric.starts_with(kHeads), by_layer = reading.metric.starts_with(kLayers);
    const char* const form = by_head ? "layer %d head %d%n" : "layer %d%n";
    const int fields = by_head ? std::sscanf(reading.where.c_str(), form, &layer, &head, &end)
                               : std::sscanf(reading.where.c_str(), form, &layer, &end);
    if (!(by_head || by_layer) || fields != (by_head ? 2 : 1) || reading.where.c_str()[end] != '\0') continue;
    const std::string name = reading.metric.substr((by_head ? kHeads : kLayers).size());
    auto found = std::find_if(all.begin(), all.end(), [&](const auto& entry) { return entry.first == name; });
    if (found == all.end()) found = all.insert(all.end(), {name, {}});
    if (by_head)
      found->second.heads.emplace(std::pair(layer, head), reading);
    else
      found->second.layers.emplace(layer, reading);
  }
  return all;
}

/// Text in place of a percentage that does not exist.
std::string change_cell(const Reading& reading) {
  const std::string text = change_of(reading);
  return text == "-" ? "–" : text;
}

std::string layer_figure(const std::string& metric, const Series& series) {
  if (series.layers.empty()) return "";
  LineChart chart{
      .label = fmt::format("{} of the old and the new artifact by layer; the numbers are in the table below", metric),
      .x_title = "layer",
      .places = {},
      .lines = {{.name = "old", .values = {}, .style = kBaselineStyle},
                {.name = "new", .values = {}, .style = kNewStyle, .strong = true}},
  };
  HtmlRows rows{{"layer", "old", "new", "change"}};
  for (const auto& [layer, reading] : series.layers) {
    chart.places.push_back(std::to_string(layer));
    chart.lines[0].values.push_back(*reading.before);
    chart.lines[1].values.push_back(reading.after);
    rows.push_back(
        {std::to_string(layer), html_number(*reading.before), html_number(reading.after), change_cell(reading)});
  }
  // A logarithmic axis shows no 0. Of overlaps, where more is better, differences say more than ratios.
  const auto& metrics = all_metrics();
  const bool is_overlap = std::any_of(metrics.begin(), metrics.end(),
                                      [&](Metric own) { return own->name == metric && own->more_is_better; });
  chart.log = !is_overlap && std::none_of(series.layers.begin(), series.layers.end(), [](const auto& entry) {
    return !(*entry.second.before > 0.0) || !(entry.second.after > 0.0);
  });
  return html_figure(metric, line_chart(chart), html_numbers(rows, "lrrr"));
}

/// New over old, for each layer and KV head: a head that is damaged is darker than its neighbors.
std::string head_figure(const std::string& metric, const Series& series) {
  if (series.heads.empty()) return "";
  std::set<int> layers, heads;
  for (const auto& [place, reading] : series.heads) {
    layers.insert(place.first);
    heads.insert(place.second);
  }
  HeatMap map{
      .label = fmt::format("{}, new over old, by layer and KV head; the numbers are in the table below", metric),
      .x_title = "layer",
      .row_title = "KV head",
      .columns = {},
      .rows = {}};
  HtmlRows rows{{"layer"}};
  for (const int head : heads) {
    map.rows.push_back(std::to_string(head));
    map.values.emplace_back();
    rows[0].push_back(fmt::format("head {}", head));
  }
  for (const int layer : layers) {
    map.columns.push_back(std::to_string(layer));
    rows.push_back({std::to_string(layer)});
    std::size_t row = 0;
    for (const int head : heads) {
      const auto found = series.heads.find({layer, head});
      const double ratio = found == series.heads.end() || *found->second.before == 0.0
                               ? NAN
                               : found->second.after / *found->second.before;
      map.values[row++].push_back(ratio);
      rows.back().push_back(html_number(ratio));
    }
  }
  return html_figure(metric + ": new over old", heat_map(map),
                     html_numbers(rows, "l" + std::string(heads.size(), 'r')));
}

/// How much of its limit the worst reading of a rule uses: 100% is the limit.
std::string used_text(const CheckResult& check) {
  const Rule& rule = check.rule;
  if (check.readings == 0 || rule.limit == 0.0) return "–";
  double found = check.worst.after;
  if (rule.relative) {
    if (!check.worst.before || *check.worst.before == 0.0) return "–";
    found = (check.worst.after - *check.worst.before) / std::abs(*check.worst.before);
  } else if (!rule.at_most) {
    return "–";
  }
  const double share = std::max(0.0, found / rule.limit);
  return std::isfinite(share) ? fmt::format("{:.0f}%", 100.0 * share) : "–";
}

/// Failures first.
std::string rule_section(const DiffReport& report) {
  HtmlRows rows{{"", "rule", "worst reading", "of the limit"}};
  for (const Outcome outcome : {Outcome::failed, Outcome::passed})
    for (const CheckResult& check : report.checks)
      if (check.outcome == outcome)
        rows.push_back({word_of(outcome), check.rule.text, detail_text(check), used_text(check)});
  const auto skipped = std::count_if(report.checks.begin(), report.checks.end(),
                                     [](const CheckResult& check) { return check.outcome == Outcome::skipped; });
  std::string body = html_table(rows, "tltr");
  if (skipped > 0) body += html_note(fmt::format("{} default rules had nothing to judge.", skipped));
  return html_section("rules", "Rules", "", body);
}

std::string verdict_section(const DiffReport& report) {
  std::size_t judged = 0;
  std::vector<const CheckResult*> failed;
  for (const CheckResult& check : report.checks) {
    judged += check.outcome == Outcome::skipped ? 0 : 1;
    if (check.outcome == Outcome::failed) failed.push_back(&check);
  }
  std::string body =
      failed.empty() ? fmt::format("<p class=\"verdict\"><strong>Passed</strong> all {} rules.</p>\n", judged)
                     : fmt::format("<p class=\"verdict\"><strong class=\"bad\">FAILED</strong> {} of {} rules.</p>\n",
                                   failed.size(), judged);
  constexpr std::size_t kMostFailures = 5;
  for (std::size_t i = 0; i < std::min(failed.size(), kMostFailures); ++i)
    body += fmt::format("<p><span class=\"bad\">{}</span> {}</p>\n", html_text(failed[i]->rule.text),
                        html_text(detail_text(*failed[i])));
  if (failed.size() > kMostFailures) body += html_note(fmt::format("and {} more", failed.size() - kMostFailures));
  body += html_note(fmt::format("The files are {}.", sameness_text(report.sameness)));
  body += html_note(basis_text(report));
  if (report.nothing_coded) body += html_missing(fmt::format("Nothing to judge: {}.", kNothingCoded));
  return html_section("verdict", "Verdict", "", body);
}

std::string change_section(const DiffReport& report) {
  HtmlRows rows{{"over layers", "old", "new", "change"}};
  for (const Reading& reading : summary(report))
    rows.push_back({reading.metric, value_text(*reading.before), value_text(reading.after), change_cell(reading)});
  return html_section("changes", "Over layers", "", html_table(rows, "lrrr"));
}

std::string place_section(const DiffReport& report) {
  std::string layers, heads;
  for (const auto& [metric, series] : series_of(report)) {
    layers += layer_figure(metric, series);
    heads += head_figure(metric, series);
  }
  std::string body = html_charts(layers);
  if (!heads.empty()) body += "<h3>By head</h3>\n" + html_charts(heads);
  if (!report.has_dump)
    body += html_missing(
        "Nothing was measured: errors of attention by layer and head appear here with --model HELDOUT.h5.");
  return html_section("places", "By layer and head", "Dashed: old. Thick: new.", body);
}

std::string difference_section(const DiffReport& report) {
  HtmlRows rows{{"differs", "old", "new"}};
  for (const Difference& difference : report.diff.differences)
    rows.push_back({difference.what, difference.before, difference.after});
  const std::string body = rows.size() > 1 ? "<div class=\"wrap\">" + html_table(rows, "ltt") + "</div>\n"
                                           : html_note("Geometry, windows, method, options and codes agree.");
  return html_section("differences", "What the files say", "", body);
}

std::string verification_section(const DiffReport& report) {
  HtmlRows rows{{"check", "old", "new"}};
  const auto word = [](const Check& check) { return check.passed ? std::string("pass") : "FAIL: " + check.detail; };
  const auto find = [](const std::vector<Check>& checks, const std::string& name) -> const Check* {
    const auto found = std::find_if(checks.begin(), checks.end(), [&](const Check& own) { return own.name == name; });
    return found == checks.end() ? nullptr : &*found;
  };
  for (const Check& check : report.verified_after) {
    const Check* before = find(report.verified_before, check.name);
    rows.push_back({check.name, before != nullptr ? word(*before) : "–", word(check)});
  }
  for (const Check& check : report.verified_before)
    if (find(report.verified_after, check.name) == nullptr) rows.push_back({check.name, word(check), "–"});
  return html_section("verification", "Checks of kvq-inspect --verify", "",
                      "<div class=\"wrap\">" + html_table(rows, "ltt") + "</div>\n");
}

}  // namespace

std::string diff_html(const DiffReport& report) {
  const std::string title = fmt::format("kvq-diff: {}", report.passed() ? "passed" : "failed");
  std::string body = fmt::format("<header>\n<h1>{}</h1>\n<p class=\"sub\">{} against {}, kvq-diff {}</p>\n</header>\n",
                                 html_text(title), html_text(report.after), html_text(report.before), KVQ_VERSION);
  body += verdict_section(report) +
          "<nav><a href=\"#verdict\">Verdict</a> <a href=\"#rules\">Rules</a> <a href=\"#changes\">Over layers</a> "
          "<a href=\"#places\">By layer and head</a> <a href=\"#differences\">What the files say</a> "
          "<a href=\"#verification\">Checks</a> </nav>\n";
  body += rule_section(report) + change_section(report) + place_section(report) + difference_section(report) +
          verification_section(report);
  return html_page(title, body);
}

}  // namespace kvq
