#include <kvq/diff/artifact_readings.h>
#include <kvq/diff/readings.h>
#include <kvq/eval/metrics.h>

#include <fmt/format.h>

#include <algorithm>

namespace kvq {

namespace {

using Names = std::vector<ReadingName>;

void add_artifact_names(Names& names) {
  const auto distance = [&](const char* name, const char* summary) {
    names.push_back({.name = name, .summary = summary, .distance = true});
  };
  const auto level = [&](const char* name, const char* summary) {
    names.push_back({.name = name, .summary = summary});
  };
  distance("verification", "checks of kvq-inspect --verify that one of the files does not pass");
  distance("golden_rows.lost", "golden rows of a layer and side that only the old artifact has");
  distance("geometry", "facts of model and layers that differ: heads, dimensions, RoPE, layers that are there");
  distance("windows", "1 if sink or recent tokens differ");
  distance("codes", "sides that are coded or rotated in another way");
  for (const DistanceRow& row : distance_rows()) distance(row.name, row.summary);
  distance("allocation.hamming", "part of the widths that changed (Block-GTQ Eq. 5)");
  distance("allocation.high_bit_jaccard", "widths of 4 and more that both have, of those that one has (Eq. 6)");
  distance("allocation.regret", "what the widths cost more by the old scores (Eq. 7)");
  level("transform.condition", "largest condition of a head's transform, layer and side");
  level("bytes_per_token", "mean over layers; layers.bytes_per_token of each");
  level("effective_bits", "of an element at 32768 tokens");
  level("layers.calibration_error", "what the calibration says it minimised, layer and side");
  for (const char* name : {"layers.allocation.hamming", "heads.allocation.hamming", "layers.allocation.regret"})
    distance(name, "");
  level("layers.bytes_per_token", "");
}

/// Names of one scope: "" for means over layers, "layers." or "heads.".
void add_measured_names(const std::string& scope, Names& names) {
  const bool of_heads = scope == "heads.";
  const auto add = [&](Metric metric, const std::string& part, std::string_view summary) {
    names.push_back({
        .name = fmt::format("{}{}{}", scope, metric->name, part),
        .summary = scope.empty() ? std::string(summary) : "",
        .measured = true,
        .ignores_windows = metric->source == MetricSource::rope_logits,
    });
  };
  for (const Metric metric : all_metrics())
    if (!metric->per_query && !metric->on_request && !(of_heads && metric->source == MetricSource::projection))
      add(metric, "", metric->summary);
  for (const Metric metric : all_metrics()) {
    if (!metric->per_query) continue;
    // A head has the mean alone.
    const auto parts = distribution_parts().first(of_heads ? 1 : distribution_parts().size());
    for (const DistributionPart& part : parts) add(metric, fmt::format(".{}", part.name), "");
  }
}

}  // namespace

const Names& reading_names() {
  static const Names all = [] {
    Names names;
    add_artifact_names(names);
    for (const char* scope : {"", "layers.", "heads."}) add_measured_names(scope, names);
    return names;
  }();
  return all;
}

const ReadingName* find_reading_name(const std::string& name) {
  const Names& all = reading_names();
  const auto row = std::find_if(all.begin(), all.end(), [&](const ReadingName& own) { return own.name == name; });
  return row == all.end() ? nullptr : &*row;
}

bool needs_codes(const std::string& metric) {
  const ReadingName* row = find_reading_name(metric);
  return row != nullptr && row->measured && !row->ignores_windows;
}

}  // namespace kvq
