#include "inspect_report.h"

#include "table.h"

#include <fmt/core.h>
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace kvq {

namespace {

std::string coder_text(const TensorPlan& plan) {
  const auto* u = std::get_if<UniformCoder>(&plan.coder);
  if (!u) return "exact";
  return fmt::format("{}-bit {} g{}", u->bits, u->levels == UniformLevels::affine ? "affine" : to_string(u->rule), u->group_size);
}

std::string clip_text(const TensorPlan& plan) {
  if (plan.clip_ratio.empty()) return "-";
  const auto [lo, hi] = std::minmax_element(plan.clip_ratio.begin(), plan.clip_ratio.end());
  if (*hi == 1.0 && *lo == 1.0) return "none";
  return *lo == *hi ? fmt::format("{:.2f}", *lo) : fmt::format("{:.2f}-{:.2f}", *lo, *hi);
}

std::string rotation_text(const TensorPlan& plan) {
  const Rotation& r = plan.rotation;
  std::string text = r.recipe;
  if (r.kind == RotationKind::block_hadamard) text += fmt::format("{}", r.order);
  if (r.scope == Scope::layer) text += " shared";
  return plan.center.empty() ? text : "c " + text;
}

/// Mean over heads of the normalised spectrum, so that heads of different scale count alike.
std::vector<float> mean_spectrum(const Rotation& rotation, int dim) {
  std::vector<float> mean(static_cast<std::size_t>(dim), 0.0f);
  for (std::size_t start = 0; start < rotation.spectrum.size(); start += static_cast<std::size_t>(dim)) {
    const float top = std::max(rotation.spectrum[start], 1e-30f);
    for (std::size_t j = 0; j < mean.size(); ++j) mean[j] += std::max(rotation.spectrum[start + j], 0.0f) / top;
  }
  return mean;
}

std::vector<std::string> side_row(const LayerPlan& layer, const TensorPlan& plan, char side) {
  const int dim = side == 'k' ? layer.geometry.head_dim : layer.geometry.v_head_dim;
  const std::vector<float> spectrum = mean_spectrum(plan.rotation, dim);
  const std::string error = plan.error ? fmt::format("{:.3f} > {:.3f}", plan.error->before, plan.error->after) : "";
  return {side == 'k' ? std::to_string(layer.layer) : "", std::string(1, side), coder_text(plan), rotation_text(plan), clip_text(plan), error,
          plan.rotation.spectrum.empty() ? "" : sparkline(spectrum.data(), dim, 12)};
}

struct LayoutRow {
  int layer;
  std::int64_t k_bytes, v_bytes, heads;
  std::int64_t token_bytes() const { return heads * (k_bytes + v_bytes); }
};

std::vector<LayoutRow> layout_rows(const Artifact& artifact) {
  std::vector<LayoutRow> rows;
  for (const LayerPlan& layer : artifact.layers)
    rows.push_back({layer.layer, row_bytes(layer.k, layer.geometry.head_dim), layer.v ? row_bytes(*layer.v, layer.geometry.v_head_dim) : 0,
                    layer.geometry.num_kv_heads});
  return rows;
}

/// Largest power of two, at most 256, that divides the bytes of one head's page.
std::int64_t alignment_of(std::int64_t bytes) { return bytes == 0 ? 256 : std::min<std::int64_t>(256, bytes & -bytes); }

double bf16_bytes(const Artifact& artifact) {
  double bytes = 0.0;
  for (const LayerPlan& layer : artifact.layers)
    bytes += 2.0 * layer.geometry.num_kv_heads * (layer.geometry.head_dim + (layer.v ? layer.geometry.v_head_dim : 0));
  return bytes;
}

double cache_bytes(const Artifact& artifact, std::int64_t context) {
  const auto exact = static_cast<double>(std::min<std::int64_t>(context, artifact.windows.sink_tokens + artifact.windows.recent_tokens));
  double coded = 0.0;
  for (const LayoutRow& row : layout_rows(artifact)) coded += static_cast<double>(row.token_bytes());
  return exact * bf16_bytes(artifact) + (static_cast<double>(context) - exact) * coded;
}

}  // namespace

std::string sparkline(const float* values, int count, int columns) {
  static const char* const kBlocks[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  constexpr double kDecades = 4.0;  // the lowest block is 1e-4 of the largest value, or less
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
  std::string text = fmt::format("{}  {} layers of {}\n", bold(artifact.model.name), artifact.layers.size(), artifact.model.num_layers);
  text += fmt::format("method       {}, {} tokens in {} sequences, seed {}, {}\n", c.method, c.tokens, c.sequences, c.seed, c.tool);
  text += fmt::format("dump         {} ({})\n", c.dump_hash, c.capture_point);
  text += fmt::format("fingerprint  {}\n", artifact.model.fingerprint.empty() ? "none" : artifact.model.fingerprint);
  text += fmt::format("windows      {} sink and {} recent tokens stay exact\n\n", artifact.windows.sink_tokens, artifact.windows.recent_tokens);
  std::vector<std::vector<std::string>> rows = {{"layer", "side", "codes", "rotation", "clip", "error", "spectrum"}};
  for (const LayerPlan& layer : artifact.layers) {
    rows.push_back(side_row(layer, layer.k, 'k'));
    if (layer.v) rows.push_back(side_row(layer, *layer.v, 'v'));
  }
  text += format_table(rows, "rllllll");
  text += "error: relative, plain codes > this plan. spectrum: eigenvalues of the target, log scale.\n";
  return text;
}

std::string describe_layer(const Artifact& artifact, const LayerPlan& layer) {
  const LayerGeometry& g = layer.geometry;
  std::string text = fmt::format("{}, layer {}\n", artifact.model.name, layer.layer);
  text += fmt::format("heads      {} query, {} key/value ({})\n", g.num_q_heads, g.num_kv_heads, to_string(g.kind));
  text += fmt::format("head_dim   {} keys, {} values; softmax scale {:.6g}, sliding window {}\n", g.head_dim, g.v_head_dim, g.softmax_scale,
                      g.sliding_window == 0 ? "none" : std::to_string(g.sliding_window));
  text += fmt::format("rope       {}, channels {} to {}, factor {}\n", to_string(g.rope.layout), g.rope.offset, g.rope.offset + g.rope.dim, g.rope.attention_factor);
  for (const char side : {'k', 'v'}) {
    if (side == 'v' && !layer.v) continue;
    const TensorPlan& plan = side == 'k' ? layer.k : *layer.v;
    const int dim = side == 'k' ? g.head_dim : g.v_head_dim;
    text += fmt::format("\n{}  {}, rotation {}", side == 'k' ? "keys  " : "values", coder_text(plan), rotation_text(plan));
    if (!plan.rotation.target.empty()) text += fmt::format(" of {}", plan.rotation.target);
    if (plan.error) text += fmt::format(", {} error {:.4f} > {:.4f}", plan.error->metric, plan.error->before, plan.error->after);
    text += "\n";
    const int heads = plan.rotation.scope == Scope::layer ? 1 : g.num_kv_heads;
    std::vector<std::vector<std::string>> rows = {{"head", "clip", "signs", "|center|", "eigenvalues", "spectrum"}};
    for (int h = 0; h < heads; ++h) {
      const auto entry = static_cast<std::size_t>(h), d = static_cast<std::size_t>(dim);
      double norm = 0.0;
      for (std::size_t j = 0; j < d && !plan.center.empty(); ++j) norm += double{plan.center[entry * d + j]} * plan.center[entry * d + j];
      const float* spectrum = plan.rotation.spectrum.empty() ? nullptr : plan.rotation.spectrum.data() + entry * d;
      rows.push_back({std::to_string(h), plan.clip_ratio.empty() ? "-" : fmt::format("{:.2f}", plan.clip_ratio[entry]),
                      plan.rotation.sign_choice.empty() ? "-" : plan.rotation.sign_choice[entry],
                      plan.center.empty() ? "-" : fmt::format("{:.3g}", std::sqrt(norm)),
                      spectrum ? fmt::format("{:.3g} .. {:.3g}", spectrum[0], spectrum[d - 1]) : "-", spectrum ? sparkline(spectrum, dim, 24) : ""});
    }
    text += format_table(rows, "rrlrll");
  }
  return text;
}

std::string describe_layout(const Artifact& artifact, int page_size, std::int64_t context) {
  std::vector<std::vector<std::string>> rows = {{"layer", "k row", "v row", "bytes/token", "bytes/page", "align"}};
  for (const LayoutRow& row : layout_rows(artifact)) {
    const std::int64_t head_page = page_size * (row.k_bytes + row.v_bytes);
    rows.push_back({std::to_string(row.layer), std::to_string(row.k_bytes), std::to_string(row.v_bytes), std::to_string(row.token_bytes()),
                    std::to_string(page_size * row.token_bytes()), std::to_string(alignment_of(head_page))});
  }
  std::string text = format_table(rows, "rrrrrr");
  const double coded = cache_bytes(artifact, context), exact = bf16_bytes(artifact) * static_cast<double>(context);
  text += fmt::format("row: one token and head, codes and scales. page: {} tokens, all KV heads. align: of one\nhead's page, when pages follow each other.\n", page_size);
  text += fmt::format("{} tokens, windows included: {} instead of {} in bf16 ({:.2f}x)\n", context, format_bytes(coded), format_bytes(exact), exact / coded);
  return text;
}

Json layout_json(const Artifact& artifact, int page_size, std::int64_t context) {
  Json layers = Json::array();
  for (const LayoutRow& row : layout_rows(artifact))
    layers.push_back({{"layer", row.layer}, {"k_row_bytes", row.k_bytes}, {"v_row_bytes", row.v_bytes}, {"bytes_per_token", row.token_bytes()},
                      {"bytes_per_page", page_size * row.token_bytes()}, {"alignment", alignment_of(page_size * (row.k_bytes + row.v_bytes))}});
  return {{"page_size", page_size}, {"context", context}, {"cache_bytes", cache_bytes(artifact, context)},
          {"bf16_bytes", bf16_bytes(artifact) * static_cast<double>(context)}, {"layers", std::move(layers)}};
}

}  // namespace kvq
