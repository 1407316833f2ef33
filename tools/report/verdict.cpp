#include "inspect/verdict.h"

#include "common/stable_order.h"
#include "inspect/serving.h"
#include "report/dot_plot.h"
#include "report/page.h"
#include "report/sections.h"
#include "report/svg.h"
#include "report/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>

namespace kvq {

namespace {

constexpr const char* kError = "output_rel_mse";

/// Built-in schemes of the caches that serving engines offer with 8 bits, and of 4-bit caches without calibration.
constexpr std::array<std::string_view, 3> kFp8 = {"fp8", "fp8-head", "fp8-unscaled"};
constexpr std::array<std::string_view, 6> kFourBits = {"naive-int4", "quarot-int4", "saw-int4",
                                                       "nvfp4",      "kivi-4",      "symmetric-norm-4"};

/// The report's artifact and the baselines of the same document, as indices into `schemes`, most bits first.
struct Yardsticks {
  std::vector<std::size_t> rows;
  bool fp8 = false, four_bits = false;
};

Yardsticks yardsticks_of(const std::vector<EvaluatedScheme>& schemes) {
  Yardsticks found;
  for (std::size_t s = 0; s < schemes.size(); ++s) {
    if (schemes[s].evaluation != schemes.front().evaluation) continue;
    const bool built_in = !schemes[s].json->contains("path");
    const std::string name = (*schemes[s].json)["name"];
    const auto names = [&](const auto& list) {
      return built_in && std::find(list.begin(), list.end(), name) != list.end();
    };
    const bool fp8 = names(kFp8), four_bits = names(kFourBits);
    found.fp8 = found.fp8 || fp8;
    found.four_bits = found.four_bits || four_bits;
    if (s == 0 || fp8 || four_bits) found.rows.push_back(s);
  }
  sort_stably(found.rows, [&](std::size_t a, std::size_t b) {
    return metric_of(*schemes[a].json, "effective_bits") > metric_of(*schemes[b].json, "effective_bits");
  });
  return found;
}

std::string line(const std::string& strong, const std::string& rest) {
  return fmt::format("<p class=\"verdict\"><strong>{}</strong> {}</p>\n", html_text(strong), html_text(rest, 400));
}

/// "naive-int4 has 0.031, fp8 0.0006"
std::string baselines_text(const Yardsticks& yardsticks, const std::vector<EvaluatedScheme>& schemes) {
  std::string text;
  for (auto row = yardsticks.rows.rbegin(); row != yardsticks.rows.rend(); ++row) {
    if (*row == 0) continue;
    text += fmt::format("{}{} {}{}", text.empty() ? "" : ", ", schemes[*row].name, text.empty() ? "has " : "",
                        html_number(metric_of((*schemes[*row].json)["mean"], kError)));
  }
  return text;
}

std::string error_figure(const Yardsticks& yardsticks, const std::vector<EvaluatedScheme>& schemes) {
  DotPlot plot{.label =
                   "Error of attention's output on held-out data, logarithmic: this artifact and baselines; the "
                   "numbers are in the table below",
               .x_title = "error of attention's output on held-out data, log scale",
               .rows = {}};
  HtmlRows rows{{"scheme", "bits", "times smaller", kError, "attention_kl"}};
  for (const std::size_t s : yardsticks.rows) {
    const Json& own = *schemes[s].json;
    const double bits = metric_of(own, "effective_bits"), error = metric_of(own["mean"], kError);
    plot.rows.push_back(
        {.name = schemes[s].name, .value = error, .style = static_cast<int>(s), .strong = schemes[s].own});
    rows.push_back({schemes[s].name, fmt::format("{:.2f}", bits), fmt::format("{:.1f}", 16.0 / bits),
                    html_number(error), html_number(metric_of(own["mean"], "attention_kl/mean"))});
  }
  const bool visible =
      std::any_of(plot.rows.begin(), plot.rows.end(), [](const DotRow& row) { return row.value > 0.0; });
  return visible ? html_figure("This artifact beside caches that are served today", dot_plot(plot),
                               html_numbers(rows, "lrrrr"))
                 : "";
}

/// What to run if the document lacks a baseline, else empty.
std::string missing_baselines(const Yardsticks& yardsticks) {
  std::string flags;
  if (!yardsticks.four_bits) flags += " --scheme naive-int4";
  if (!yardsticks.fp8) flags += " --scheme fp8";
  return flags.empty() ? ""
                       : html_missing(fmt::format("The evaluation has no {} baseline: kvq-eval{} --json adds {}.",
                                                  yardsticks.four_bits ? "fp8"
                                                  : yardsticks.fp8     ? "4-bit"
                                                                       : "4-bit and no fp8",
                                                  flags, yardsticks.fp8 || yardsticks.four_bits ? "one" : "them"));
}

std::string serving_line(const Artifact& artifact) {
  constexpr std::string_view kNot = "not served: ";
  const std::vector<ServingGroup> groups = serving_groups(artifact);
  const std::string word = serving_word(groups);
  if (groups.size() > 1)
    return line(word == "not served" ? "Not served"
                : word == "in part"  ? "Served in part"
                                     : "Served",
                "layers differ, see Serving.");
  const std::string text = serving_text(groups.front());
  return text.starts_with(kNot) ? line("Not served", text.substr(kNot.size()) + ".")
                                : line("Served", "by " + text + ".");
}

}  // namespace

std::string verdict_section(const Artifact& artifact, const std::string& path,
                            const std::vector<EvaluatedScheme>& schemes, std::int64_t context) {
  const Verdict verdict = verdict_of(artifact, std::filesystem::path(path).filename(), context);
  std::string body = line(fmt::format("{:.1f} times smaller", verdict.times_smaller()),
                          fmt::format("than bfloat16: {}, exact windows included.", cache_text(verdict)));
  const double error =
      schemes.empty() || !schemes.front().own ? NAN : metric_of((*schemes.front().json)["mean"], kError);
  std::string figure;
  if (std::isfinite(error)) {
    const Yardsticks yardsticks = yardsticks_of(schemes);
    const std::string baselines = baselines_text(yardsticks, schemes);
    body += line("Error " + html_number(error),
                 fmt::format("of attention's output on held-out data{}.", baselines.empty() ? "" : "; " + baselines));
    figure = html_charts(error_figure(yardsticks, schemes)) + missing_baselines(yardsticks);
  } else {
    body += line("Error", error_text(verdict) + ".");
    figure = html_missing(
        "No evaluation of this artifact was given. The error beside 4-bit and fp8 caches appears here after kvq-eval "
        "--model HELDOUT.h5 ARTIFACT --scheme naive-int4 --scheme fp8 --json > EVAL.json, then --eval EVAL.json.");
  }
  body += serving_line(artifact);
  return html_section("verdict", "Verdict", "", body + figure);
}

}  // namespace kvq
