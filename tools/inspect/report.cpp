#include "inspect/report.h"

#include "common/plural.h"
#include "common/table.h"
#include "common/text_wrap.h"
#include "inspect/legend.h"
#include "inspect/serving.h"
#include "inspect/transforms.h"
#include "inspect/widths.h"

#include <kvq/core/text.h>

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <span>

namespace kvq {

namespace {

constexpr int kSpectrumColumns = 12, kLeastSpectrumColumns = 8;

/// A coder's name, as the text shows it between width and group size.
struct CoderName {
  std::string operator()(const ExactCoder&) const { return "exact"; }
  std::string operator()(const UniformCoder& coder) const {
    return coder.levels == UniformLevels::affine ? "affine" : to_string(coder.rule);
  }
  std::string operator()(const CodebookCoder&) const { return "codebook"; }
  std::string operator()(const TrellisCoder& coder) const {
    int memory = 0;  // wide codes have less memory; the largest memory is the one that was asked for
    for (const TrellisTaps& taps : coder.taps) memory = std::max(memory, taps.memory);
    return memory == 0 ? "trellis" : fmt::format("trellis m{}", memory);
  }
};

/// " fitted" for a coder whose tables were fitted to data, else empty.
struct TableSource {
  const char* operator()(const ExactCoder&) const { return ""; }
  const char* operator()(const UniformCoder&) const { return ""; }
  const char* operator()(const CodebookCoder& coder) const { return coder.fitted ? " fitted" : ""; }
  const char* operator()(const TrellisCoder&) const { return ""; }
};

std::string codes_text(const TensorPlan& plan) {
  std::string name = std::visit(CoderName{}, plan.coder);
  if (is_exact(plan.coder)) return name;
  if (plan.allocation) return fmt::format("mixed {} {:.2f}b", name, mean_code_bits(plan));
  return fmt::format("{}-bit {} g{}", code_bits(plan.coder), name, group_size(plan.coder));
}

std::string clip_text(const TensorPlan& plan) {
  if (plan.clip_ratio.empty()) return "-";
  const auto [lo, hi] = std::minmax_element(plan.clip_ratio.begin(), plan.clip_ratio.end());
  if (*hi == 1.0 && *lo == 1.0) return "none";
  return *lo == *hi ? fmt::format("{:.2f}", *lo) : fmt::format("{:.2f}-{:.2f}", *lo, *hi);
}

/// Mean over heads of the spectra, each divided by its largest eigenvalue, so that all heads count alike.
std::vector<float> mean_spectrum(const Rotation& rotation, int dim) {
  std::vector<float> mean(static_cast<std::size_t>(dim), 0.0f);
  for (std::size_t start = 0; start < rotation.spectrum.size(); start += static_cast<std::size_t>(dim)) {
    const float top = std::max(rotation.spectrum[start], 1e-30f);
    for (std::size_t j = 0; j < mean.size(); ++j) mean[j] += std::max(rotation.spectrum[start + j], 0.0f) / top;
  }
  return mean;
}

using Rows = std::vector<std::vector<std::string>>;

/// Which optional columns the overview has.
struct Columns {
  int spectrum = 0;  ///< width in characters; 0: no column
  bool transform = false, clip = true;
  bool largest_gain_only = false;
};

std::vector<std::string> side_row(const LayerPlan& layer, const TensorPlan& plan, Side side, const Columns& columns) {
  const int dim = layer.geometry.dim(side);
  const std::string error = plan.error ? change_text(plan.error->before, plan.error->after, 3) : "";
  std::vector<std::string> row = {side == Side::k ? std::to_string(layer.layer) : "", name(side), coder_text(plan),
                                  rotation_text(plan)};
  if (columns.transform) row.push_back(transform_text(plan, columns.largest_gain_only));
  if (columns.clip) row.push_back(clip_text(plan));
  row.push_back(error);
  if (columns.spectrum > 0)
    row.push_back(plan.rotation.spectrum.empty()
                      ? ""
                      : sparkline(mean_spectrum(plan.rotation, dim).data(), dim, columns.spectrum));
  return row;
}

Rows overview_rows(const Artifact& artifact, const Columns& columns) {
  Rows rows = {{"layer", "side", "codes", "rotation"}};
  if (columns.transform) rows.front().push_back("transform");
  if (columns.clip) rows.front().push_back("clip");
  rows.front().push_back("error");
  if (columns.spectrum > 0) rows.front().push_back("spectrum");
  for (const LayerPlan& layer : artifact.layers) {
    rows.push_back(side_row(layer, layer.k, Side::k, columns));
    if (layer.v) rows.push_back(side_row(layer, *layer.v, Side::v, columns));
  }
  return rows;
}

bool has_spectrum(const Artifact& artifact) {
  return std::any_of(artifact.layers.begin(), artifact.layers.end(), [](const LayerPlan& layer) {
    return !layer.k.rotation.spectrum.empty() || (layer.v && !layer.v->rotation.spectrum.empty());
  });
}

bool has_clips(const Artifact& artifact) {
  return std::any_of(artifact.layers.begin(), artifact.layers.end(), [](const LayerPlan& layer) {
    return !layer.k.clip_ratio.empty() || (layer.v && !layer.v->clip_ratio.empty());
  });
}

/// Cuts long recipes, with dots at the end, until the table fits the page; --layer shows whole recipes.
void shorten_rotations(Rows& rows) {
  constexpr std::size_t kRotation = 3;
  const std::size_t width = table_width(rows);
  if (width <= kPageColumns) return;
  std::size_t longest = 0;
  for (const auto& row : rows) longest = std::max(longest, row[kRotation].size());
  const std::size_t kept = std::max(rows.front()[kRotation].size(), longest - std::min(longest, width - kPageColumns));
  for (auto& row : rows)
    if (row[kRotation].size() > kept) row[kRotation] = row[kRotation].substr(0, kept - 2) + "..";
}

/// The table of the overview. If the table is too wide for the page, overview_table() first narrows or drops the
/// spectrum, then shows only the largest outlier gain, then cuts recipes.
std::string overview_table(const Artifact& artifact) {
  Columns columns{.spectrum = has_spectrum(artifact) ? kSpectrumColumns : 0, .transform = has_transforms(artifact)};
  if (columns.transform) columns.clip = has_clips(artifact);
  Rows rows = overview_rows(artifact, columns);
  if (columns.spectrum > 0 && table_width(rows) > kPageColumns) {
    columns.spectrum -= static_cast<int>(table_width(rows) - kPageColumns);
    if (columns.spectrum < kLeastSpectrumColumns) columns.spectrum = 0;
    rows = overview_rows(artifact, columns);
  }
  if (columns.transform && table_width(rows) > kPageColumns) {
    columns.largest_gain_only = true;
    rows = overview_rows(artifact, columns);
  }
  shorten_rotations(rows);
  std::string text = format_table(rows, "r" + std::string(rows.front().size() - 1, 'l'));
  text += rotation_legend(recipes_of(artifact)) + error_legend(artifact);
  if (columns.spectrum > 0) text += "spectrum: eigenvalues of the target, log scale.\n";
  if (!columns.transform) return text;
  return text +
         fmt::format("transform: its kind, and the {} of the heads.\n",
                     columns.largest_gain_only ? "largest outlier gain" : "outlier gains") +
         kOutlierGainMeans;
}

/// The error on held-out tokens; empty if there are none.
std::string held_out_line(const Json& held_out) {
  if (held_out.is_null()) return "";
  return wrapped("held out     ",
                 fmt::format("output error {} on {} tokens",
                             change_text(held_out.at("baseline_error"), held_out.at("output_error"), 3),
                             held_out.at("tokens").get<std::int64_t>()));
}

std::span<const float> row_of(const std::vector<float>& values, int head, int dim) {
  return values.empty() ? std::span<const float>{}
                        : std::span(values).subspan(static_cast<std::size_t>(head) * static_cast<std::size_t>(dim),
                                                    static_cast<std::size_t>(dim));
}

std::string center_text(const TensorPlan& plan, int head, int dim) {
  const auto center = row_of(plan.center, head, dim);
  return center.empty()
             ? "-"
             : fmt::format("{:.3g}", std::sqrt(std::inner_product(center.begin(), center.end(), center.begin(), 0.0)));
}

/// A table of all heads of a side with one width. For a transform, columns of the transform replace the spectrum.
std::string heads_table(const TensorPlan& plan, int heads, int dim) {
  Rows rows = {{"head", "clip", "signs", "|center|"}};
  for (const char* name :
       plan.transform ? std::array{"outlier gain", "condition"} : std::array{"eigenvalues", "spectrum"})
    rows.front().push_back(name);
  for (int h = 0; h < heads; ++h) {
    const auto entry = static_cast<std::size_t>(h);
    rows.push_back({std::to_string(h), plan.clip_ratio.empty() ? "-" : fmt::format("{:.2f}", plan.clip_ratio[entry]),
                    plan.rotation.sign_choice.empty() ? "-" : plan.rotation.sign_choice[entry],
                    center_text(plan, h, dim)});
    if (plan.transform) {
      rows.back().push_back(fmt::format("{:.4g}", plan.transform->outlier_gain[entry]));
      rows.back().push_back(fmt::format("{:.4g}", plan.transform->condition[entry]));
      continue;
    }
    const auto spectrum = row_of(plan.rotation.spectrum, h, dim);
    rows.back().push_back(spectrum.empty() ? "-" : fmt::format("{:.3g} .. {:.3g}", spectrum.front(), spectrum.back()));
    rows.back().push_back(spectrum.empty() ? "" : sparkline(spectrum.data(), dim, 24));
  }
  return format_table(rows, plan.transform ? "rrlrrr" : "rrlrll");
}

/// A table of all heads of a side with mixed widths.
std::string mixed_heads_table(const TensorPlan& plan, int heads, int dim, bool color) {
  Rows rows = {{"head", "bits", "|center|", "widths, widest first"}};
  if (plan.transform)
    rows.front().insert(rows.front().begin() + 3, {"outlier gain", "condition"});
  else
    rows.front().push_back("spectrum");
  for (int h = 0; h < heads; ++h) {
    const auto entry = static_cast<std::size_t>(h);
    const auto widths = std::span(plan.allocation->channel_bits)
                            .subspan(entry * static_cast<std::size_t>(dim), static_cast<std::size_t>(dim));
    rows.push_back({std::to_string(h), fmt::format("{:.2f}", std::accumulate(widths.begin(), widths.end(), 0.0) / dim),
                    center_text(plan, h, dim)});
    if (plan.transform) {
      rows.back().push_back(fmt::format("{:.4g}", plan.transform->outlier_gain[entry]));
      rows.back().push_back(fmt::format("{:.4g}", plan.transform->condition[entry]));
    }
    rows.back().push_back(width_bar(widths, 32, color));
    const auto spectrum = row_of(plan.rotation.spectrum, h, dim);
    if (!plan.transform) rows.back().push_back(spectrum.empty() ? "-" : sparkline(spectrum.data(), dim, 24));
  }
  return format_table(rows, plan.transform ? "rrrrrl" : "rrrll");
}

std::string centroids_text(const Centroids& c) {
  std::string text = fmt::format("{} centroids {}, clustered {} the rotation", c.count,
                                 c.joint ? "for all heads" : "a head", c.after_rotation ? "after" : "before");
  if (c.inertia.empty()) return text;
  const auto [lo, hi] = std::minmax_element(c.inertia.begin(), c.inertia.end());
  return text +
         (*lo == *hi ? fmt::format(", inertia {:.3f}", *lo) : fmt::format(", inertia {:.3f} to {:.3f}", *lo, *hi));
}

std::string describe_side(const LayerPlan& layer, const TensorPlan& plan, Side side, bool color) {
  const int dim = layer.geometry.dim(side);
  std::string text = fmt::format("{}, rotation {}", coder_text(plan), rotation_text(plan));
  if (!plan.rotation.target.empty()) text += fmt::format(" of {}", plan.rotation.target);
  if (plan.transform) text += fmt::format(", transform {}", plan.transform->kind);
  text = "\n" + wrapped(fmt::format("{:<6}  ", plural(side)), text);
  if (plan.error) {
    const std::string baseline = baseline_text(*plan.error);
    text += wrapped("error   ", fmt::format("{}, in sample: {}{}", plan.error->metric,
                                            change_text(plan.error->before, plan.error->after, 4),
                                            baseline.empty() ? "" : fmt::format(" (from plain {})", baseline)));
  }
  if (plan.allocation) text += widths_summary(plan, dim) + "\n";
  if (plan.centroids) text += centroids_text(*plan.centroids) + "\n";
  const int heads = plan.rotation.scope == Scope::layer ? 1 : layer.geometry.num_kv_heads;
  return text + (plan.allocation ? mixed_heads_table(plan, heads, dim, color) : heads_table(plan, heads, dim));
}

}  // namespace

std::string coder_text(const TensorPlan& plan) {
  std::string text = codes_text(plan);
  text += std::visit(TableSource{}, plan.coder);
  if (plan.centroids) text += fmt::format(" km{}{}", plan.centroids->count, plan.centroids->joint ? " joint" : "");
  return text;
}

std::string rotation_text(const TensorPlan& plan) {
  const Rotation& r = plan.rotation;
  std::string text = r.recipe;
  if (r.kind == RotationKind::block_hadamard) text += fmt::format("{}", r.order);
  if (r.scope == Scope::layer) text += " shared";
  return plan.center.empty() ? text : "c " + text;
}

std::string sparkline(const float* values, int count, int columns) {
  static const char* const kBlocks[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  constexpr double kDecades = 4.0;  // the eight block characters cover four decades below the largest value
  const double top = std::max(1e-30, static_cast<double>(*std::max_element(values, values + count)));
  std::string text;
  const int shown = std::min(columns, count);
  for (int c = 0; c < shown; ++c) {
    const int begin = c * count / shown, end = std::max(begin + 1, (c + 1) * count / shown);
    const double mean = std::accumulate(values + begin, values + end, 0.0) / (end - begin);
    const double level = mean <= 0.0 ? 0.0 : 1.0 + std::log10(mean / top) / kDecades;
    text += kBlocks[std::clamp(static_cast<int>(level * 8.0), 0, 7)];
  }
  return text;
}

std::string describe(const Artifact& artifact, bool color) {
  const Provenance& c = artifact.calibration;
  const auto bold = [&](const std::string& text) { return color ? "\x1b[1m" + text + "\x1b[0m" : text; };
  std::string text = fmt::format("{}  {}\n", bold(safe_line(artifact.model.name)), layers_text(artifact));
  text += fmt::format("method       {}, {} in {}, seed {}, {}\n", c.method, counted(c.tokens, "token"),
                      counted(c.sequences, "sequence"), c.seed, c.tool);
  text += fmt::format("dump         {} ({})\n", c.dump_hash, c.capture_point);
  text += fmt::format("fingerprint  {}\n", artifact.model.fingerprint.empty() ? "none" : artifact.model.fingerprint);
  text += fmt::format("windows      {} sink and {} recent tokens stay exact\n", artifact.windows.sink_tokens,
                      artifact.windows.recent_tokens);
  text += held_out_line(c.held_out) + serving_lines(artifact, "serving      ") + "\n";
  return text + overview_table(artifact) + describe_widths(artifact, color);
}

std::string describe_layer(const Artifact& artifact, const LayerPlan& layer, bool color) {
  const LayerGeometry& g = layer.geometry;
  std::string text = fmt::format("{}, layer {}\n", safe_line(artifact.model.name), layer.layer);
  text += fmt::format("heads      {} query, {} key/value ({})\n", g.num_q_heads, g.num_kv_heads, to_string(g.kind));
  text += fmt::format("head_dim   {} keys, {} values; softmax scale {:.6g}, sliding window {}\n", g.head_dim,
                      g.v_head_dim, g.softmax_scale, g.sliding_window == 0 ? "none" : std::to_string(g.sliding_window));
  if (g.logit_softcap > 0.0)
    text += fmt::format("soft cap   logits become {0:g} tanh(logit / {0:g})\n", g.logit_softcap);
  if (!g.sink_logits.empty()) text += fmt::format("sinks      a learned logit for each query head\n");
  text += fmt::format("rope       {}, channels {} to {}, factor {}\n", to_string(g.rope.layout), g.rope.offset,
                      g.rope.offset + g.rope.dim, g.rope.attention_factor);
  Artifact alone;
  alone.layers = {layer};
  text += serving_lines(alone, "serving    ");
  text += describe_side(layer, layer.k, Side::k, color);
  if (layer.v) text += describe_side(layer, *layer.v, Side::v, color);
  text += "\n" + rotation_legend(recipes_of(alone));
  return layer.k.transform || (layer.v && layer.v->transform) ? text + kOutlierGainMeans : text;
}

}  // namespace kvq
