#include "report/report.h"

#include "common/table.h"
#include "common/text_output.h"
#include "inspect/layout.h"
#include "inspect/serving.h"
#include "inspect/transforms.h"
#include "report/page.h"
#include "report/sections.h"
#include "report/sides.h"
#include "report/text.h"

#include <kvq/core/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <string_view>

namespace kvq {

namespace {

std::string tile(const std::string& name, const std::string& big, const std::string& more) {
  return fmt::format("<div><dt>{}</dt><dd class=\"big\">{}</dd><dd class=\"more\">{}</dd></div>\n", html_text(name),
                     html_text(big, 60), html_text(more));
}

/// Means over layers.
struct Averages {
  double k_bits = 0.0, v_bits = 0.0, bits = 0.0, effective_bits = 0.0, bytes = 0.0, exact_bytes = 0.0;
  bool has_values = false;
};

Averages averages_of(const Artifact& artifact, std::int64_t context) {
  Averages mean;
  double value_layers = 0.0;
  for (const LayerPlan& layer : artifact.layers) {
    const LayerGeometry& g = layer.geometry;
    const double k = mean_code_bits(layer.k), v = layer.v ? mean_code_bits(*layer.v) : 0.0;
    mean.k_bits += k;
    mean.v_bits += v;
    value_layers += layer.v ? 1.0 : 0.0;
    mean.bits += mean_over_channels(layer, k, v);
    mean.effective_bits +=
        mean_over_channels(layer, effective_bits(layer.k, g.head_dim, artifact.windows, context),
                           layer.v ? effective_bits(*layer.v, g.v_head_dim, artifact.windows, context) : 0.0);
    mean.bytes += static_cast<double>(cache_layout(layer).token_bytes());
    mean.exact_bytes += exact_bytes(layer);
  }
  const auto layers = static_cast<double>(artifact.layers.size());
  for (double* sum : {&mean.k_bits, &mean.bits, &mean.effective_bits, &mean.bytes, &mean.exact_bytes}) *sum /= layers;
  mean.has_values = value_layers > 0.0;
  if (mean.has_values) mean.v_bits /= value_layers;
  return mean;
}

std::string geometry_text(const Artifact& artifact) {
  const LayerGeometry& g = artifact.layers.front().geometry;
  const bool alike = std::all_of(artifact.layers.begin(), artifact.layers.end(), [&](const LayerPlan& layer) {
    return layer.geometry.num_q_heads == g.num_q_heads && layer.geometry.num_kv_heads == g.num_kv_heads &&
           layer.geometry.head_dim == g.head_dim;
  });
  const std::string layers = fmt::format("{} of {} layers", artifact.layers.size(), artifact.model.num_layers);
  return layers +
         (alike ? fmt::format(", {} query and {} KV heads of {} channels", g.num_q_heads, g.num_kv_heads, g.head_dim)
                : ", heads differ from layer to layer");
}

/// Error on held-out data if a document has this artifact, else the error that calibration measured.
std::string error_tile(const Artifact& artifact, const std::vector<EvaluatedScheme>& schemes) {
  if (!schemes.empty() && schemes.front().own) {
    const Json& mean = (*schemes.front().json)["mean"];
    return tile("Error of the output, held out", html_number(metric_of(mean, "output_rel_mse")),
                fmt::format("KL {} nats, 99th percentile {} ({})", html_number(metric_of(mean, "attention_kl/mean")),
                            html_number(metric_of(mean, "attention_kl/p99")), schemes.front().evaluation->file));
  }
  double before = 0.0, after = 0.0;
  int count = 0;
  for (const LayerPlan& layer : artifact.layers) {
    if (!layer.k.error) continue;
    before += layer.k.error->before;
    after += layer.k.error->after;
    ++count;
  }
  if (count == 0) return "";
  return tile("Error of the keys, calibration", html_number(after / count),
              fmt::format("plain codes: {}; mean over layers", html_number(before / count)));
}

std::string navigation(bool transforms) {
  std::string html = "<nav>";
  for (const auto& [id, name] : {std::pair{"verdict", "Verdict"},
                                 {"allocation", "Widths"},
                                 {"transforms", "Transforms"},
                                 {"errors", "Errors"},
                                 {"context", "By context"},
                                 {"front", "Error against size"},
                                 {"spectra", "Spectra"},
                                 {"bytes", "Bytes"},
                                 {"serving", "Serving"},
                                 {"provenance", "Provenance"}})
    if (transforms || id != std::string_view{"transforms"}) html += fmt::format("<a href=\"#{}\">{}</a> ", id, name);
  return html + "</nav>\n";
}

void refuse_overwriting(const std::string& path, const std::string& input) {
  std::error_code unknown;
  if (std::filesystem::equivalent(path, input, unknown))
    throw Error{ErrorKind::usage, fmt::format("--html: {} is one of the files to read", path), "choose another name"};
}

}  // namespace

std::string headline_section(const Artifact& artifact, const std::vector<EvaluatedScheme>& schemes,
                             std::int64_t context) {
  const Averages mean = averages_of(artifact, context);
  const Windows& w = artifact.windows;
  std::string tiles = tile("Model", artifact.model.name, geometry_text(artifact));
  tiles += tile("Method", artifact.calibration.method,
                fmt::format("{} tokens in {} sequences", artifact.calibration.tokens, artifact.calibration.sequences));
  tiles += tile("Code bits", fmt::format("{:.2f}", mean.bits),
                mean.has_values ? fmt::format("keys {:.2f}, values {:.2f}", mean.k_bits, mean.v_bits)
                                : fmt::format("keys {:.2f}, no values", mean.k_bits));
  tiles += tile("Effective bits", fmt::format("{:.2f}", mean.effective_bits),
                fmt::format("scales, padding and windows included, at {} tokens", context));
  tiles += tile("Bytes per token and layer", html_number(mean.bytes),
                fmt::format("{} in bf16", html_number(mean.exact_bytes)));
  const Json layout = layout_json(artifact, 1, context);
  const double coded = layout["cache_bytes"], exact = layout["bf16_bytes"];
  tiles += tile(fmt::format("Cache of {} tokens", context), format_bytes(coded),
                fmt::format("windows included; {} in bf16, {:.2f} times as much", format_bytes(exact), exact / coded));
  tiles += tile("Windows", w == Windows{} ? "none" : fmt::format("{} + {}", w.sink_tokens, w.recent_tokens),
                "first and last tokens of a sequence that stay exact");
  tiles += tile("Serving", serving_word(serving_groups(artifact)), "kernels of libkvq_runtime; see below");
  return "<dl class=\"tiles\">\n" + tiles + error_tile(artifact, schemes) + "</dl>\n";
}

void write_html_report(const NamedArtifact& artifact, const std::vector<std::string>& evaluation_paths,
                       std::int64_t context, const std::string& path) {
  refuse_overwriting(path, artifact.path);
  for (const std::string& input : evaluation_paths) refuse_overwriting(path, input);
  const std::vector<Evaluation> evaluations = read_evaluations(evaluation_paths, artifact);
  const std::vector<EvaluatedScheme> schemes = schemes_of(evaluations, artifact);
  const Artifact& own = artifact.artifact;
  const std::string title =
      fmt::format("{}: KV cache by {}", readable(own.model.name, 80), readable(own.calibration.method, 40));
  std::string body =
      fmt::format("<header>\n<h1>{}</h1>\n<p class=\"sub\">{}, {}</p>\n</header>\n", html_text(title),
                  html_text(std::filesystem::path(artifact.path).filename().string()), html_text(own.calibration.tool));
  body += verdict_section(own, artifact.path, schemes, context) + headline_section(own, schemes, context) +
          navigation(has_transforms(own)) + allocation_section(own) + transform_section(own) +
          error_section(own, evaluations, schemes);
  body += context_section(schemes) + pareto_section(schemes) + spectrum_section(own) + bytes_section(own, context) +
          serving_section(own) + provenance_section(own, evaluations);
  const std::string page = html_page(title, body);
  write_text_output(path, page);
}

}  // namespace kvq
