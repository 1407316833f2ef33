#include <kvq/artifact/manifest.h>
#include <kvq/artifact/repeated_facts.h>
#include <kvq/artifact/versions.h>

#include <fmt/format.h>

#include <algorithm>
#include <span>

namespace kvq {

namespace {

std::string joined(const Json& words) {
  std::string text;
  for (const Json& word : words) text += (text.empty() ? "" : ",") + word.get<std::string>();
  return text;
}

/// Index of the RoPE block of each channel.
std::vector<std::size_t> blocks_of_channels(const LayerGeometry& geometry) {
  std::vector<std::size_t> index(static_cast<std::size_t>(geometry.head_dim));
  const std::vector<RopeBlock> blocks = rope_blocks(geometry);
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    index[static_cast<std::size_t>(blocks[b].first)] = b;
    if (blocks[b].second >= 0) index[static_cast<std::size_t>(blocks[b].second)] = b;
  }
  return index;
}

/// One head's widths.
struct HeadWidths {
  std::span<const std::uint8_t> channels;
  std::span<const std::uint16_t> order;
  std::span<const std::uint8_t> blocks;
  std::span<const float> energies;
};

/// Whether a head's channels were mixed before they got widths: scores of 0, and the smallest width for all blocks.
bool is_mixed_first(const HeadWidths& head) {
  const std::uint8_t least = *std::min_element(head.channels.begin(), head.channels.end());
  return std::all_of(head.energies.begin(), head.energies.end(), [](float energy) { return energy == 0.0f; }) &&
         std::all_of(head.blocks.begin(), head.blocks.end(), [&](std::uint8_t width) { return width == least; });
}

std::string blocks_fault(const HeadWidths& head, const std::vector<std::size_t>& block_of, std::size_t h) {
  if (is_mixed_first(head)) return "";
  for (std::size_t place = 0; place < head.channels.size(); ++place) {
    const std::size_t block = block_of[head.order[place]];
    if (head.blocks[block] != head.channels[place])
      return fmt::format("head {}: block_bits of block {}: expected {}, the width of its channel {}, found {}", h,
                         block, head.channels[place], head.order[place], head.blocks[block]);
  }
  return "";
}

/// Channels of one width are gathered in ascending order of their sources. Without RoPE blocks a source is a channel,
/// and with them a block, whose channels stay together.
std::string order_fault(const HeadWidths& head, const std::vector<std::size_t>& block_of, std::size_t h) {
  const bool blocks = !head.blocks.empty() && !is_mixed_first(head);
  for (std::size_t place = 1; place < head.order.size(); ++place) {
    if (head.channels[place] != head.channels[place - 1]) continue;
    const std::size_t before = head.order[place - 1], own = head.order[place];
    const bool ascends =
        blocks ? block_of[before] < block_of[own] || (block_of[before] == block_of[own] && before < own) : before < own;
    if (!ascends)
      return fmt::format("head {}: channel_order: expected ascending sources of one width, found {} behind {}", h, own,
                         before);
  }
  return "";
}

}  // namespace

std::string version_fault(const SafetensorsFile& file, const Artifact& artifact) {
  const Json used = required_features(artifact.layers);
  const std::string words = file.metadata().at("requires");
  if (joined(used) != words)
    return fmt::format("requires: expected \"{}\", the features of the plans, found \"{}\"", joined(used), words);
  const std::string lowest = lowest_version(used, !artifact.golden.empty(), has_fields_of_1_3(artifact));
  const std::string& version = file.metadata().at("version");
  if (minor_of(version) < minor_of(lowest))
    return fmt::format("version: expected {} or higher for these features, found {}", lowest, version);
  return "";
}

std::string geometry_fault(const LayerPlan& plan) {
  const LayerGeometry& g = plan.geometry;
  const std::string where = fmt::format("layer {}: ", plan.layer);
  if (g.kind == AttentionKind::mla_rope && g.num_kv_heads != 1)
    return where + fmt::format("kind mla_rope: expected 1 KV head, found {}", g.num_kv_heads);
  if (g.kind == AttentionKind::gqa && !plan.v) return where + "kind gqa: expected a plan of the values, found none";
  return "";
}

std::string spectrum_fault(const Rotation& rotation, int dim) {
  constexpr double kRounding = 1e-6;  // of the largest eigenvalue
  const auto d = static_cast<std::size_t>(dim);
  for (std::size_t i = 0; i < rotation.spectrum.size(); ++i) {
    const float first = rotation.spectrum[i / d * d], own = rotation.spectrum[i];
    if (i % d != 0 && own > rotation.spectrum[i - 1])
      return fmt::format("head {}: spectrum: expected descending numbers, found {} behind {}", i / d, own,
                         rotation.spectrum[i - 1]);
    if (double{own} < -kRounding * double{first} || first < 0.0f)
      return fmt::format("head {}: spectrum: expected numbers that are not negative, found {}", i / d, own);
  }
  return "";
}

std::string widths_fault(const TensorPlan& plan, const LayerGeometry& geometry) {
  if (!plan.allocation) return "";
  const BitAllocation& a = *plan.allocation;
  const bool of_blocks = a.unit == "rope_block";
  const std::vector<std::size_t> block_of = of_blocks ? blocks_of_channels(geometry) : std::vector<std::size_t>{};
  const auto heads = static_cast<std::size_t>(plan.rotation.scope == Scope::layer ? 1 : geometry.num_kv_heads);
  const std::size_t d = a.channel_bits.size() / heads, blocks = a.block_bits.size() / heads;
  for (std::size_t h = 0; h < heads; ++h) {
    const HeadWidths head{std::span(a.channel_bits).subspan(h * d, d), std::span(a.channel_order).subspan(h * d, d),
                          std::span(a.block_bits).subspan(h * blocks, blocks),
                          std::span(a.block_energy).subspan(h * blocks, blocks)};
    if (of_blocks)
      if (std::string fault = blocks_fault(head, block_of, h); !fault.empty()) return fault;
    if (std::string fault = order_fault(head, block_of, h); !fault.empty()) return fault;
  }
  return "";
}

}  // namespace kvq
