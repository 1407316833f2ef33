#include "inspect/report.h"
#include "inspect/widths.h"
#include "report/bars.h"
#include "report/line_chart.h"
#include "report/page.h"
#include "report/sections.h"
#include "report/sides.h"
#include "report/text.h"

#include <kvq/plan/allocation_stats.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

WidthSlice slice_of(const TensorPlan& plan, int layer) {
  WidthSlice slice{.place = std::to_string(layer)};
  if (!plan.allocation) {
    slice.share[is_exact(plan.coder) ? kExactWidth : static_cast<std::size_t>(code_bits(plan.coder))] = 1.0;
    return slice;
  }
  const WidthHistogram counts = width_histogram(plan.allocation->channel_bits);
  for (std::size_t width = 0; width < counts.size(); ++width)
    slice.share[width] = static_cast<double>(counts[width]) / static_cast<double>(plan.allocation->channel_bits.size());
  return slice;
}

/// Table of how many channels have each width; dashes for a layer without mixed widths.
std::string width_numbers(const Artifact& artifact, const ReportSide& side) {
  const auto counts_of = [](const TensorPlan& plan) { return width_histogram(plan.allocation->channel_bits); };
  HtmlRows rows{{"layer", "mean bits", "entropy", "over free"}};
  std::vector<std::size_t> widths;
  for (std::size_t width = 0; width <= 8; ++width) {
    if (!side.any(artifact, [&](const TensorPlan& plan) { return plan.allocation && counts_of(plan)[width] > 0; }))
      continue;
    widths.push_back(width);
    rows[0].push_back(fmt::format("{} bits", width));
  }
  for (const LayerPlan& layer : artifact.layers) {
    const TensorPlan* plan = side.plan(layer);
    if (plan == nullptr) continue;
    rows.push_back({std::to_string(layer.layer), html_number(mean_code_bits(*plan))});
    if (plan->allocation) {
      rows.back().push_back(html_number(width_entropy(width_histogram(allocated_widths(*plan->allocation)))));
      rows.back().push_back(over_free_text(*plan->allocation));
      for (const std::size_t width : widths) rows.back().push_back(std::to_string(counts_of(*plan)[width]));
    }
    rows.back().resize(rows[0].size(), "–");
  }
  return html_numbers(rows, "l" + std::string(rows[0].size() - 1, 'r'));
}

std::string width_figure(const Artifact& artifact, const ReportSide& side) {
  std::vector<WidthSlice> slices;
  for (const LayerPlan& layer : artifact.layers)
    if (const TensorPlan* plan = side.plan(layer)) slices.push_back(slice_of(*plan, layer.layer));
  const std::string label = fmt::format(
      "Share of the {}' channels at each width, one slice for each of {} layers; the numbers are in the table below",
      plural(side.side), slices.size());
  return html_figure(fmt::format("{}: share of channels at each width, %", side.title), width_chart(label, slices),
                     width_legend(slices) + width_numbers(artifact, side));
}

bool is_mixed(const TensorPlan& plan) { return plan.allocation.has_value(); }

/// Table of the sides with one width: coder, rotation, layers.
std::string uniform_table(const Artifact& artifact) {
  HtmlRows rows{{"side", "codes", "rotation", "layers"}};
  for (const ReportSide& side : report_sides()) {
    if (side.any(artifact, is_mixed)) continue;
    std::vector<std::pair<std::pair<std::string, std::string>, std::vector<int>>> kinds;
    for (const LayerPlan& layer : artifact.layers) {
      const TensorPlan* plan = side.plan(layer);
      if (plan == nullptr) continue;
      const std::pair<std::string, std::string> kind{coder_text(*plan), rotation_text(*plan)};
      auto found = std::find_if(kinds.begin(), kinds.end(), [&](const auto& entry) { return entry.first == kind; });
      if (found == kinds.end()) found = kinds.insert(kinds.end(), {kind, {}});
      found->second.push_back(layer.layer);
    }
    for (const auto& [kind, layers] : kinds)
      rows.push_back({plural(side.side), kind.first, kind.second, range_text(layers)});
  }
  return rows.size() == 1 ? "" : html_table(rows, "lttt");
}

std::vector<ByteBar> byte_bars(const Artifact& artifact) {
  std::vector<ByteBar> bars;
  for (const LayerPlan& layer : artifact.layers) {
    const CacheLayout cache = cache_layout(layer);
    const double heads = cache.num_kv_heads;
    bars.push_back({
        .place = std::to_string(layer.layer),
        .keys = heads * cache.k_row_bytes,
        .values = heads * cache.v_row_bytes,
        .exact = exact_bytes(layer),
    });
  }
  return bars;
}

std::string byte_figure(const Artifact& artifact) {
  const std::vector<ByteBar> bars = byte_bars(artifact);
  HtmlRows rows{{"layer", "keys", "values", "both", "exact", "times smaller"}};
  for (const ByteBar& bar : bars) {
    const double both = bar.keys + bar.values;
    rows.push_back({bar.place, html_number(bar.keys), html_number(bar.values), html_number(both),
                    html_number(bar.exact), both > 0.0 ? fmt::format("{:.2f}", bar.exact / both) : "–"});
  }
  return html_figure("Bytes of a token, all KV heads",
                     byte_chart("Bytes of a coded token in each layer, keys and values stacked, beside those of "
                                "bfloat16 rows; the numbers are in the table below",
                                bars),
                     html_numbers(rows, "lrrrrr"));
}

/// Chart of code bits (codes alone) and effective bits (codes and everything beside them) of each layer.
std::string bits_figure(const Artifact& artifact, std::int64_t context) {
  LineChart chart{
      .label = "Effective bits of an element in each layer, keys and values; the numbers are in the table below",
      .x_title = "layer",
      .places = layer_names(artifact),
      .lines = {},
      .log = false,
      .scale_of = {0.0},
  };
  HtmlRows rows{{"layer"}};
  for (const std::string& name : chart.places) rows.push_back({name});
  for (const ReportSide& side : report_sides()) {
    if (!side.any(artifact, [](const TensorPlan&) { return true; })) continue;
    std::vector<double> bits;
    rows[0].insert(rows[0].end(), {fmt::format("{}: code bits", plural(side.side)), "effective bits"});
    for (const LayerPlan& layer : artifact.layers) {
      const TensorPlan* plan = side.plan(layer);
      bits.push_back(plan == nullptr ? NAN : effective_bits(*plan, side.dim(layer), artifact.windows, context));
      rows[bits.size()].insert(rows[bits.size()].end(),
                               {html_number(plan == nullptr ? NAN : mean_code_bits(*plan)), html_number(bits.back())});
    }
    chart.scale_of.insert(chart.scale_of.end(), bits.begin(), bits.end());
    chart.lines.push_back({.name = plural(side.side), .values = std::move(bits), .style = side.style});
  }
  return html_figure(fmt::format("Effective bits of an element, {} tokens", context), line_chart(chart),
                     html_numbers(rows, "l" + std::string(rows[0].size() - 1, 'r')));
}

}  // namespace

std::string allocation_section(const Artifact& artifact) {
  std::string charts;
  for (const ReportSide& side : report_sides())
    if (side.any(artifact, is_mixed)) charts += width_figure(artifact, side);
  std::string body = html_charts(charts) + uniform_table(artifact);
  if (charts.empty())
    body += html_missing(
        "One width for all channels of a row. Methods that mix widths (block-gtq, kvq) have a fingerprint here.");
  return html_section("allocation", "Widths", "Which part of the channels, all KV heads together, got how many bits.",
                      body);
}

std::string bytes_section(const Artifact& artifact, std::int64_t context) {
  return html_section("bytes", "Bytes", "Codes, scales and padding of a token outside the windows.",
                      html_charts(byte_figure(artifact) + bits_figure(artifact, context)));
}

}  // namespace kvq
