#include "inspect/compare.h"

#include "common/table.h"
#include "inspect/report.h"

#include <kvq/core/error.h>

#include <fmt/core.h>

#include <algorithm>
#include <array>

namespace kvq {

namespace {

/// One field of the geometry as text, so that one loop compares and reports all fields.
struct Fact {
  const char* name;
  std::string value;
};

std::array<Fact, 12> facts(const LayerGeometry& g) {
  return {{{"num_q_heads", std::to_string(g.num_q_heads)},
           {"num_kv_heads", std::to_string(g.num_kv_heads)},
           {"head_dim", std::to_string(g.head_dim)},
           {"v_head_dim", std::to_string(g.v_head_dim)},
           {"kind", to_string(g.kind)},
           {"softmax_scale", fmt::format("{}", g.softmax_scale)},
           {"sliding_window", std::to_string(g.sliding_window)},
           {"logit_softcapping", fmt::format("{}", g.logit_softcap)},
           {"rope layout", to_string(g.rope.layout)},
           {"rope dim", std::to_string(g.rope.dim)},
           {"rope offset", std::to_string(g.rope.offset)},
           {"rope attention_factor", fmt::format("{}", g.rope.attention_factor)}}};
}

class Comparer {
 public:
  Comparer(const NamedArtifact& own, const NamedArtifact& reference) : own_(own), reference_(reference) {}

  AllocationComparison compare() const {
    check_layers();
    AllocationComparison comparison;
    for (std::size_t i = 0; i < own_.artifact.layers.size(); ++i) {
      const LayerPlan &own = own_.artifact.layers[i], &wanted = reference_.artifact.layers[i];
      check_geometry(own, wanted);
      check_blocks(own, wanted);
      comparison.layers.push_back({.layer = own.layer});
      AllocationDistance& distance = comparison.layers.back().distance;
      distance.add(own.k.allocation->block_bits, wanted.k.allocation->block_bits, wanted.k.allocation->block_energy);
      comparison.total.merge(distance);
    }
    return comparison;
  }

 private:
  [[noreturn]] void differs(const std::string& where, const std::string& expected, const std::string& found) const {
    throw Error{ErrorKind::bad_input, fmt::format("{}: {}expected {} as in {}, found {}", own_.path, where, expected,
                                                  reference_.path, found)};
  }

  void check_layers() const {
    const auto &own = own_.artifact.layers, &wanted = reference_.artifact.layers;
    const auto name = [](const std::vector<LayerPlan>& layers, std::size_t i) {
      return i < layers.size() ? fmt::format("layer {}", layers[i].layer) : std::string("no further layer");
    };
    for (std::size_t i = 0; i < std::max(own.size(), wanted.size()); ++i)
      if (name(own, i) != name(wanted, i)) differs("", name(wanted, i), name(own, i));
  }

  void check_geometry(const LayerPlan& own, const LayerPlan& wanted) const {
    const std::string where = fmt::format("layer {}: ", own.layer);
    const auto found = facts(own.geometry), expected = facts(wanted.geometry);
    for (std::size_t i = 0; i < found.size(); ++i)
      if (found[i].value != expected[i].value)
        differs(where, fmt::format("{} {}", expected[i].name, expected[i].value), found[i].value);
    const auto &frequencies = own.geometry.rope.inv_freq, &expected_frequencies = wanted.geometry.rope.inv_freq;
    for (std::size_t i = 0; i < frequencies.size() && i < expected_frequencies.size(); ++i)
      if (frequencies[i] != expected_frequencies[i])
        differs(where, fmt::format("rope inv_freq[{}] {}", i, expected_frequencies[i]),
                fmt::format("{}", frequencies[i]));
  }

  static void require_blocks(const LayerPlan& layer, const std::string& path) {
    if (layer.k.allocation && !layer.k.allocation->block_bits.empty()) return;
    throw Error{ErrorKind::bad_input,
                fmt::format("{}: layer {} k: expected widths by RoPE block, found {}{}", path, layer.layer,
                            coder_text(layer.k), layer.k.allocation ? " by channel" : ""),
                "--compare reads keys of --method block-gtq or kvq with --k-allocation rope_block"};
  }

  void check_blocks(const LayerPlan& own, const LayerPlan& wanted) const {
    require_blocks(own, own_.path);
    require_blocks(wanted, reference_.path);
    // Head counts are equal here, so only a rotation shared by all heads can have fewer widths.
    const auto name = [](const LayerPlan& layer) {
      return fmt::format("widths for each {}", layer.k.rotation.scope == Scope::layer ? "layer" : "KV head");
    };
    if (own.k.allocation->block_bits.size() != wanted.k.allocation->block_bits.size())
      differs(fmt::format("layer {} k: ", own.layer), name(wanted), name(own));
  }

  const NamedArtifact& own_;
  const NamedArtifact& reference_;
};

std::vector<std::string> distance_row(const std::string& name, const AllocationDistance& d) {
  return {name,
          std::to_string(d.slots),
          std::to_string(d.changed),
          fmt::format("{:.3f}", d.hamming()),
          fmt::format("{:.3f}", d.high_bit_jaccard()),
          format_excess(d.regret(), 2)};
}

Json distance_json(const AllocationDistance& d) {
  return {{"slots", d.slots},
          {"changed", d.changed},
          {"hamming", d.hamming()},
          {"high_in_both", d.high_in_both},
          {"high_in_any", d.high_in_any},
          {"high_bit_jaccard", d.high_bit_jaccard()},
          {"regret", d.regret()}};
}

}  // namespace

AllocationComparison compare_allocations(const NamedArtifact& own, const NamedArtifact& reference) {
  return Comparer(own, reference).compare();
}

std::string describe_comparison(const AllocationComparison& comparison) {
  std::vector<std::vector<std::string>> rows = {{"layer", "slots", "changed", "hamming", "jaccard@4", "regret"}};
  for (const auto& [layer, distance] : comparison.layers) rows.push_back(distance_row(std::to_string(layer), distance));
  rows.push_back(distance_row("all", comparison.total));
  return format_table(rows, "rrrrrr") +
         "slot: a RoPE block of a KV head's keys. hamming: share of slots that changed.\n"
         "jaccard@4: overlap of the slots with 4 bits or more. regret: sum of s 4^-b over\n"
         "the reference's, by its scores s.\n";
}

Json comparison_json(const AllocationComparison& comparison) {
  Json layers = Json::array();
  for (const auto& [layer, distance] : comparison.layers) {
    layers.push_back(distance_json(distance));
    layers.back()["layer"] = layer;
  }
  return {{"layers", std::move(layers)}, {"total", distance_json(comparison.total)}};
}

}  // namespace kvq
