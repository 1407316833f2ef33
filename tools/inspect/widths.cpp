#include "inspect/widths.h"

#include "common/plural.h"
#include "common/table.h"

#include <kvq/plan/allocation_stats.h>

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

namespace kvq {

namespace {

constexpr int kBarCells = 32;
constexpr int kWidest = static_cast<int>(std::tuple_size_v<WidthHistogram>) - 1;

/// A side with mixed widths, one line of the overview.
struct MixedSide {
  int layer;
  Side side;
  const TensorPlan* plan;
  int dim;
  const BitAllocation& allocation() const { return *plan->allocation; }
  WidthHistogram histogram() const { return width_histogram(allocated_widths(allocation())); }
};

std::vector<MixedSide> mixed_sides(const Artifact& artifact) {
  std::vector<MixedSide> sides;
  for (const LayerPlan& layer : artifact.layers) {
    if (layer.k.allocation) sides.push_back({layer.layer, Side::k, &layer.k, layer.geometry.head_dim});
    if (layer.v && layer.v->allocation) sides.push_back({layer.layer, Side::v, &*layer.v, layer.geometry.v_head_dim});
  }
  return sides;
}

const char* slot_name(const BitAllocation& allocation) { return allocation.block_bits.empty() ? "channels" : "blocks"; }

std::string bar_table(const std::vector<MixedSide>& sides, bool color) {
  std::vector<std::vector<std::string>> rows = {
      {"layer", "side", "widths, widest first", "kinds", "entropy", "bytes", "over free"}};
  for (const MixedSide& side : sides) {
    const WidthHistogram histogram = side.histogram();
    rows.push_back({std::to_string(side.layer), name(side.side),
                    width_bar(side.allocation().channel_bits, kBarCells, color),
                    std::to_string(distinct_widths(histogram)), fmt::format("{:.2f}", width_entropy(histogram)),
                    std::to_string(row_bytes(*side.plan, side.dim)), over_free_text(side.allocation())});
  }
  return format_table(rows, "rllrrrr");
}

/// Table of how often each width occurs; a width that no side has gets no column.
std::string count_table(const std::vector<MixedSide>& sides) {
  WidthHistogram all{};
  for (const MixedSide& side : sides) {
    const WidthHistogram own = side.histogram();
    for (std::size_t width = 0; width < own.size(); ++width) all[width] += own[width];
  }
  const auto add_counts = [&](std::vector<std::string>& row, auto&& text) {
    for (int width = kWidest; width >= 0; --width)
      if (all[static_cast<std::size_t>(width)] > 0) row.push_back(text(width));
  };
  std::vector<std::vector<std::string>> rows = {{"layer", "side", "of width"}};
  add_counts(rows.front(), [](int width) { return std::to_string(width); });
  for (const MixedSide& side : sides) {
    rows.push_back({std::to_string(side.layer), name(side.side), slot_name(side.allocation())});
    const WidthHistogram own = side.histogram();
    add_counts(rows.back(), [&](int width) { return std::to_string(own[static_cast<std::size_t>(width)]); });
  }
  return format_table(rows, "rll" + std::string(rows.front().size() - 3, 'r'));
}

/// The widths of all layers, if any layer of the side is mixed.
std::optional<ModelWidths> widths_of_all(const std::vector<MixedSide>& sides, Side which) {
  std::vector<LayerWidths> layers;
  for (const MixedSide& side : sides)
    if (side.side == which) layers.push_back({side.layer, &side.allocation()});
  return layers.empty() ? std::nullopt : std::optional(model_widths(layers));
}

/// Block-GTQ Tables 8 and 9, then Table 10. A width that no side has gets no column.
std::string model_tables(const std::vector<MixedSide>& sides) {
  std::vector<std::pair<const char*, ModelWidths>> all;
  for (const Side which : {Side::k, Side::v})
    if (const auto own = widths_of_all(sides, which)) all.emplace_back(name(which), *own);
  std::vector<std::vector<std::string>> shares = {{"side", "% of"}},
                                        entropies = {{"side", "layers", "kinds", "entropy", "sigma", "highest (layer)",
                                                      "lowest (layer)"}};
  const auto occurs = [&](int width) {
    return std::any_of(all.begin(), all.end(), [&](const auto& own) { return own.second.share(width) > 0.0; });
  };
  for (int width = kWidest; width >= 0; --width)
    if (occurs(width)) shares.front().push_back(std::to_string(width));
  const auto extreme = [](const ModelWidths::Extreme& own) {
    return fmt::format("{:.2f} ({})", own.entropy, own.layer);
  };
  for (const auto& [side, own] : all) {
    shares.push_back({side, own.of_blocks ? "blocks" : "channels"});
    for (int width = kWidest; width >= 0; --width)
      if (occurs(width)) shares.back().push_back(fmt::format("{:.1f}", 100.0 * own.share(width)));
    entropies.push_back({side, std::to_string(own.layers), fmt::format("{:.2f}", own.mean_kinds),
                         fmt::format("{:.2f}", own.mean_entropy), fmt::format("{:.2f}", own.entropy_deviation),
                         extreme(own.highest), extreme(own.lowest)});
  }
  return "\nwidths of all layers together (Block-GTQ Tables 8 to 10)\n" +
         format_table(shares, "ll" + std::string(shares.front().size() - 2, 'r')) + "\n" +
         format_table(entropies, "lrrrrrr") + "kinds, entropy: means over layers; sigma: deviation of the entropy.\n";
}

Json extreme_json(const ModelWidths::Extreme& extreme) {
  return {{"entropy", extreme.entropy}, {"layer", extreme.layer}};
}

}  // namespace

std::string width_cells(int width, int count, bool color) {
  // Colors by width. Widths 0 and 1 are gray, so that protected channels stand out.
  static constexpr const char* kColors[] = {"90", "90", "34", "36", "32", "33", "35", "31", "1;31"};
  const std::string digits(static_cast<std::size_t>(count), static_cast<char>('0' + width));
  return color ? fmt::format("\x1b[{}m{}\x1b[0m", kColors[width], digits) : digits;
}

std::string width_bar(std::span<const std::uint8_t> widths, int cells, bool color) {
  const WidthHistogram histogram = width_histogram(widths);
  const auto total = static_cast<std::int64_t>(widths.size());
  std::string text;
  std::int64_t above = 0;  // channels with at least the current width
  int shown = 0;
  for (int width = kWidest; width >= 0; --width) {
    above += histogram[static_cast<std::size_t>(width)];
    int count = 0;
    for (; shown < cells && (2 * shown + 1) * total < 2 * cells * above; ++shown) ++count;
    if (count > 0) text += width_cells(width, count, color);
  }
  return text;
}

std::string over_free_text(const BitAllocation& allocation) {
  if (!(allocation.free_objective > 0.0)) return "-";
  return format_excess(allocation.objective / allocation.free_objective - 1.0, 1);
}

std::string describe_widths(const Artifact& artifact, bool color) {
  const std::vector<MixedSide> sides = mixed_sides(artifact);
  if (sides.empty()) return "";
  std::string text = "\n" + bar_table(sides, color);
  text += fmt::format(
      "digit: width of 1/{} of the channels of all heads. entropy: bits, of the counts\n"
      "below. bytes: one row. over free: cost over the best widths of as many bits.\n\n",
      kBarCells);
  return text + count_table(sides) + model_tables(sides);
}

Json model_widths_json(const Artifact& artifact) {
  Json json;
  const std::vector<MixedSide> sides = mixed_sides(artifact);
  for (const Side which : {Side::k, Side::v}) {
    const auto own = widths_of_all(sides, which);
    if (!own) continue;
    Json shares = Json::array();
    for (int width = 0; width <= kWidest; ++width) shares.push_back(own->share(width));
    json[name(which)] = {{"layers", own->layers},
                         {"histogram", own->histogram},
                         {"histogram_of", own->of_blocks ? "blocks" : "channels"},
                         {"shares", std::move(shares)},
                         {"distinct_widths", own->mean_kinds},
                         {"entropy", own->mean_entropy},
                         {"entropy_deviation", own->entropy_deviation},
                         {"highest", extreme_json(own->highest)},
                         {"lowest", extreme_json(own->lowest)}};
  }
  return json;
}

std::string widths_summary(const TensorPlan& plan, int dim) {
  const BitAllocation& a = *plan.allocation;
  const WidthHistogram histogram = width_histogram(allocated_widths(a));
  return fmt::format("widths by {}: {}, entropy {:.2f} bits over {}\nrow {} bytes, {}, objective {} over free", a.score,
                     counted(distinct_widths(histogram), "kind"), width_entropy(histogram), slot_name(a),
                     row_bytes(plan, dim), a.has_row_scale() ? "one scale" : "a scale for each width",
                     over_free_text(a));
}

}  // namespace kvq
