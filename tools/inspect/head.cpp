#include "inspect/head.h"

#include "common/table.h"
#include "inspect/report.h"
#include "inspect/transforms.h"
#include "inspect/widths.h"

#include <kvq/core/text.h>

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace kvq {

namespace {

constexpr int kScoreCells = 24;

/// A RoPE block, its score and its width.
struct BlockWidth {
  RopeBlock block;
  std::optional<double> inv_freq = {};  ///< absent outside the rotary channels
  double energy = 0.0;
  int bits = 0;
};

/// A position in the rotated row, the channel (or eigenvector) that is stored there, and its width.
struct ChannelWidth {
  int place = 0, source = 0;
  std::optional<double> eigenvalue = {};
  int bits = 0;
};

/// Whether widths go by RoPE block. Only keys have RoPE blocks, so `block_bits` of values are ignored.
bool by_block(const TensorPlan& plan, Side side) { return side == Side::k && !plan.allocation->block_bits.empty(); }

/// @return  widths in the order of RoPE blocks
std::vector<BlockWidth> block_widths(const LayerPlan& layer, int head) {
  const BitAllocation& a = *layer.k.allocation;
  const std::vector<RopeBlock> blocks = rope_blocks(layer.geometry);
  const std::size_t start = static_cast<std::size_t>(layer.k.rotation.head_index(head)) * blocks.size();
  const auto rotary = static_cast<std::size_t>(layer.geometry.rope.dim / 2);
  std::vector<BlockWidth> widths;
  for (std::size_t i = 0; i < blocks.size() && start + i < a.block_bits.size(); ++i) {
    BlockWidth width{.block = blocks[i], .energy = a.block_energy[start + i], .bits = a.block_bits[start + i]};
    if (i < rotary && i < layer.geometry.rope.inv_freq.size()) width.inv_freq = layer.geometry.rope.inv_freq[i];
    widths.push_back(width);
  }
  return widths;
}

/// @return  [D], widest channel first, as rows are stored
std::vector<ChannelWidth> channel_widths(const TensorPlan& plan, int head, int dim) {
  const auto d = static_cast<std::size_t>(dim), start = static_cast<std::size_t>(plan.rotation.head_index(head)) * d;
  const BitAllocation& a = *plan.allocation;
  std::vector<ChannelWidth> widths;
  for (std::size_t j = 0; j < d; ++j) {
    const int source = a.channel_order[start + j];
    ChannelWidth width{.place = static_cast<int>(j), .source = source, .bits = a.channel_bits[start + j]};
    if (!plan.rotation.spectrum.empty())
      width.eigenvalue = plan.rotation.spectrum[start + static_cast<std::size_t>(source)];
    widths.push_back(width);
  }
  return widths;
}

/// A bar with one cell for each factor of two; `top` has kScoreCells cells. A score falls by 4 for each bit, so one bit
/// is two cells.
std::string log_bar(double value, double top) {
  if (!(value > 0.0 && top > 0.0)) return "";
  const int cells = std::clamp(kScoreCells + static_cast<int>(std::lround(std::log2(value / top))), 0, kScoreCells);
  std::string text;
  for (int i = 0; i < cells; ++i) text += "█";
  return text;
}

std::string width_text(int bits, bool color) { return bits == 0 ? "" : width_cells(bits, bits, color); }

std::string block_table(const std::vector<BlockWidth>& widths, bool color) {
  double top = 0.0;
  for (const BlockWidth& width : widths) top = std::max(top, width.energy);
  std::vector<std::vector<std::string>> rows = {
      {"block", "channels", "inv_freq", "energy", "energy, log scale", "bits", "width"}};
  for (std::size_t i = 0; i < widths.size(); ++i) {
    const auto& [block, inv_freq, energy, bits] = widths[i];
    rows.push_back({std::to_string(i),
                    block.second < 0 ? std::to_string(block.first) : fmt::format("{}, {}", block.first, block.second),
                    inv_freq ? fmt::format("{:.3g}", *inv_freq) : "-", fmt::format("{:.3g}", energy),
                    log_bar(energy, top), std::to_string(bits), width_text(bits, color)});
  }
  // A head whose blocks are equal has no scores; each block then shows the width of the head's narrowest channels.
  const char* const note = top > 0.0
                               ? "energy: the score. A cell of its bar is a factor of two; two are worth a bit.\n"
                               : "no scores: the blocks are alike, the whole row is mixed. width: the narrowest.\n";
  return format_table(rows, "rlrrlrl") + note;
}

std::string channel_table(const std::vector<ChannelWidth>& widths, bool color) {
  const bool has_spectrum = widths.front().eigenvalue.has_value();
  double top = 0.0;
  for (const ChannelWidth& width : widths) top = std::max(top, width.eigenvalue.value_or(0.0));
  std::vector<std::vector<std::string>> rows = {
      {"place", has_spectrum ? "eigenvector" : "channel", "eigenvalue", "eigenvalue, log scale", "bits", "width"}};
  for (const auto& [place, source, eigenvalue, bits] : widths)
    rows.push_back({std::to_string(place), std::to_string(source),
                    eigenvalue ? fmt::format("{:.3g}", *eigenvalue) : "-", log_bar(eigenvalue.value_or(0.0), top),
                    std::to_string(bits), width_text(bits, color)});
  return format_table(rows, "rrrlrl");
}

std::string describe_side(const LayerPlan& layer, const TensorPlan& plan, Side side, int head, bool color) {
  const int dim = layer.geometry.dim(side);
  std::string text = fmt::format("\n{:<6}  {}, rotation {}", plural(side), coder_text(plan), rotation_text(plan));
  if (!plan.rotation.target.empty()) text += fmt::format(" of {}", plan.rotation.target);
  if (plan.transform) {
    const auto entry = static_cast<std::size_t>(plan.rotation.head_index(head));
    text += fmt::format("\ntransform {}, outlier gain {:.4g}, condition {:.4g}", plan.transform->kind,
                        plan.transform->outlier_gain[entry], plan.transform->condition[entry]);
  }
  if (!plan.allocation) return text + "\none width for all channels\n";
  text += fmt::format("\nwidths by {}{}\n", plan.allocation->score,
                      plan.rotation.scope == Scope::layer ? ", the same for all heads" : "");
  return text + (by_block(plan, side) ? block_table(block_widths(layer, head), color)
                                      : channel_table(channel_widths(plan, head, dim), color));
}

/// Widths of a side; null if the side has one width.
Json widths_json(const LayerPlan& layer, const TensorPlan& plan, Side side, int head) {
  if (!plan.allocation) return nullptr;
  Json list = Json::array();
  if (by_block(plan, side)) {
    for (const auto& [block, inv_freq, energy, bits] : block_widths(layer, head)) {
      list.push_back(
          {{"channels", Json::array({block.first})}, {"inv_freq", nullptr}, {"energy", energy}, {"bits", bits}});
      if (block.second >= 0) list.back()["channels"].push_back(block.second);
      if (inv_freq) list.back()["inv_freq"] = *inv_freq;
    }
    return {{"blocks", std::move(list)}};
  }
  for (const auto& [place, source, eigenvalue, bits] : channel_widths(plan, head, layer.geometry.dim(side))) {
    list.push_back({{"place", place}, {"source", source}, {"eigenvalue", nullptr}, {"bits", bits}});
    if (eigenvalue) list.back()["eigenvalue"] = *eigenvalue;
  }
  return {{"channels", std::move(list)}};
}

/// Widths and transform of a side; null if the side has neither.
Json side_json(const LayerPlan& layer, const TensorPlan& plan, Side side, int head) {
  Json json = widths_json(layer, plan, side, head);
  if (!plan.transform) return json;
  const auto entry = static_cast<std::size_t>(plan.rotation.head_index(head));
  json["transform"] = {{"kind", plan.transform->kind},
                       {"outlier_gain", plan.transform->outlier_gain[entry]},
                       {"condition", plan.transform->condition[entry]}};
  return json;
}

}  // namespace

std::string describe_head(const Artifact& artifact, const LayerPlan& layer, int head, bool color) {
  std::string text = fmt::format("{}, layer {}, head {}\n", safe_line(artifact.model.name), layer.layer, head) +
                     describe_side(layer, layer.k, Side::k, head, color);
  if (layer.v) text += describe_side(layer, *layer.v, Side::v, head, color);
  return layer.k.transform || (layer.v && layer.v->transform) ? text + kOutlierGainMeans : text;
}

Json head_json(const LayerPlan& layer, int head) {
  Json json = {{"layer", layer.layer}, {"head", head}, {"k", side_json(layer, layer.k, Side::k, head)}};
  if (layer.v) json["v"] = side_json(layer, *layer.v, Side::v, head);
  return json;
}

}  // namespace kvq
