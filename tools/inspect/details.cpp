#include "inspect/details.h"

#include <kvq/plan/allocation_stats.h>

#include <algorithm>

namespace kvq {

namespace {

/// A flat array as a list of rows with `columns` numbers each.
template <typename T>
Json nested(const std::vector<T>& values, std::size_t columns) {
  Json rows = Json::array();
  for (auto it = values.begin(); it != values.end(); it += static_cast<std::ptrdiff_t>(columns))
    rows.push_back(std::vector<T>(it, it + static_cast<std::ptrdiff_t>(columns)));
  return rows;
}

/// @param known  the `allocation` object of the manifest
Json allocation_details(const BitAllocation& a, Json known, int dim) {
  const WidthHistogram histogram = width_histogram(allocated_widths(a));
  const auto channels = static_cast<std::size_t>(dim), blocks = static_cast<std::size_t>(num_blocks(dim));
  known["histogram"] = histogram;
  known["histogram_of"] = a.block_bits.empty() ? "channels" : "blocks";
  known["distinct_widths"] = distinct_widths(histogram);
  known["entropy"] = width_entropy(histogram);
  known["channel_bits"] = nested(a.channel_bits, channels);
  known["channel_order"] = nested(a.channel_order, channels);
  if (a.has_row_scale()) known["segment_gain"] = nested(a.segment_gain, std::size_t{kGainWidths});
  known["block_bits"] = nested(a.block_bits, blocks);
  known["block_energy"] = nested(a.block_energy, blocks);
  return known;
}

/// Adds a coder's tables. The manifest lists the tables without numbers.
struct CoderDetails {
  const Json& known;
  Json& json;
  void operator()(const ExactCoder&) const {}
  void operator()(const UniformCoder&) const {}
  void operator()(const CodebookCoder& coder) const {
    Json tables = Json::object();
    for (const auto& [width, table] : coder.tables) {
      const std::size_t entries = std::size_t{1} << width;
      tables[std::to_string(width)] = coder.per_head ? nested(table, entries) : Json(table);
    }
    json["codebooks"] = known.at("codebooks");
    json["codebooks"]["tables"] = std::move(tables);
  }
  void operator()(const TrellisCoder& coder) const {
    json["trellis"] = Json::array();
    for (const TrellisTaps& taps : coder.taps)
      json["trellis"].push_back(
          {{"bits", taps.bits}, {"memory", taps.memory}, {"search", to_string(taps.search)}, {"theta", taps.theta}});
  }
};

/// The details of a side; an empty object if the manifest already says everything about it.
Json side_details(const TensorPlan& plan, const Json& known, int dim) {
  Json json = Json::object();
  if (plan.allocation) json["allocation"] = allocation_details(*plan.allocation, known.at("allocation"), dim);
  std::visit(CoderDetails{known, json}, plan.coder);
  if (plan.transform) {
    json["transform"] = known.at("transform");
    if (!plan.rotation.channel_scale.empty())
      json["transform"]["channel_scale"] = nested(plan.rotation.channel_scale, static_cast<std::size_t>(dim));
  }
  if (plan.centroids) {
    json["centroids"] = known.at("centroids");
    json["centroids"]["index_bytes"] = index_bytes(plan);
  }
  return json;
}

}  // namespace

Json details_json(const Artifact& artifact, const Json& manifest, int layer) {
  Json layers = Json::array();
  bool any = false;
  for (std::size_t i = 0; i < artifact.layers.size(); ++i) {
    const LayerPlan& plan = artifact.layers[i];
    const Json& known = manifest.at("layers").at(i);
    Json entry = {{"layer", plan.layer}, {"k", side_details(plan.k, known.at("k"), plan.geometry.head_dim)}};
    if (plan.v) entry["v"] = side_details(*plan.v, known.at("v"), plan.geometry.v_head_dim);
    any = any || !entry["k"].empty() || (plan.v && !entry["v"].empty());
    if (layer < 0 || layer == plan.layer) layers.push_back(std::move(entry));
  }
  return any ? layers : Json();
}

}  // namespace kvq
