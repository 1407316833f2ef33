#include "diff/readings.h"

#include <kvq/core/text.h>
#include <kvq/eval/plan_distance.h>
#include <kvq/plan/allocation_stats.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

namespace kvq {

namespace {

constexpr std::int64_t kContext = 32768;  // at which effective bits are compared
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// A distance between two plans of a side: name, summary, field. Readings follow the order of kDistances.
struct DistanceRow {
  const char *name, *summary;
  std::optional<double> PlanDistance::* value;
};
constexpr DistanceRow kDistances[] = {
    {"orthogonality", "largest |R^T R - I| of new rotations, |A^-1 A - I| of transforms", &PlanDistance::orthogonality},
    {"rotation.factor", "largest deviation of a rotation from its recipe's factors", &PlanDistance::factor},
    {"rotation.importance", "change of the covariance that meets each channel, part of its trace",
     &PlanDistance::importance},
    {"rotation.covariance", "relative change of the covariance that rotations diagonalise", &PlanDistance::covariance},
    {"rotation.angle", "largest principal angle between eigenspaces, degrees", &PlanDistance::angle},
    {"transform.gauge", "change of transformed rows, but for orthogonal maps inside a width", &PlanDistance::gauge},
    {"transform.scale", "largest change of a channel scale, powers of two", &PlanDistance::channel_scale},
    {"transform.outlier_gain", "largest relative change of a head's outlier gain", &PlanDistance::outlier_gain},
    {"center", "relative change of the centres", &PlanDistance::center},
    {"clip", "largest change of a clip ratio", &PlanDistance::clip},
    {"codebook", "largest distance between matched codebook entries", &PlanDistance::codebook},
    {"trellis", "largest change of a theta", &PlanDistance::trellis},
    {"centroids", "mean distance between matched centroids, over their spread", &PlanDistance::centroids}};

class Facts {
 public:
  explicit Facts(std::vector<Difference>& differences) : differences_(differences) {}
  template <typename T>
  void compare(const std::string& what, const T& before, const T& after) {
    if (before == after) return;
    differences_.push_back({what, fmt::format("{}", before), fmt::format("{}", after)});
  }

 private:
  std::vector<Difference>& differences_;
};

void compare_json(Facts& facts, const std::string& what, const Json& before, const Json& after) {
  if (before == after) return;
  if (!before.is_object() || !after.is_object()) {
    facts.compare(what, printable(before.dump(), 60), printable(after.dump(), 60));
    return;
  }
  std::map<std::string, std::pair<Json, Json>> keys;
  for (const auto& [key, value] : before.items()) keys[key].first = value;
  for (const auto& [key, value] : after.items()) keys[key].second = value;
  for (const auto& [key, values] : keys)
    compare_json(facts, what + "." + printable(key, 40), values.first, values.second);
}

/// Compares the facts that must agree for one artifact to replace the other.
void compare_geometry(Facts& facts, const std::string& where, const LayerGeometry& a, const LayerGeometry& b) {
  facts.compare(where + " num_q_heads", a.num_q_heads, b.num_q_heads);
  facts.compare(where + " num_kv_heads", a.num_kv_heads, b.num_kv_heads);
  facts.compare(where + " head_dim", a.head_dim, b.head_dim);
  facts.compare(where + " v_head_dim", a.v_head_dim, b.v_head_dim);
  facts.compare<std::string>(where + " kind", to_string(a.kind), to_string(b.kind));
  facts.compare(where + " softmax_scale", a.softmax_scale, b.softmax_scale);
  facts.compare(where + " sliding_window", a.sliding_window, b.sliding_window);
  facts.compare<std::string>(where + " rope layout", to_string(a.rope.layout), to_string(b.rope.layout));
  facts.compare(where + " rotary_dim", a.rope.dim, b.rope.dim);
  facts.compare(where + " rotary_offset", a.rope.offset, b.rope.offset);
  facts.compare(where + " rope_attention_factor", a.rope.attention_factor, b.rope.attention_factor);
  if (a.rope.inv_freq != b.rope.inv_freq) facts.compare<std::string>(where + " rope_inv_freq", "one", "another");
}

/// The parts of a coder's text that differ between coders: after the name, and after the scales.
struct CoderExtras {
  bool mixed;
  std::pair<std::string, std::string> operator()(const ExactCoder&) const { return {}; }
  std::pair<std::string, std::string> operator()(const UniformCoder& coder) const {
    return {"", coder.levels == UniformLevels::affine ? fmt::format(" zero {}", to_string(coder.zero)) : ""};
  }
  std::pair<std::string, std::string> operator()(const CodebookCoder&) const { return {}; }
  std::pair<std::string, std::string> operator()(const TrellisCoder& coder) const {
    std::string memories;
    if (!mixed)
      for (const TrellisTaps& taps : coder.taps) memories += fmt::format(" m{}", taps.memory);
    return {memories, ""};
  }
};

std::string coder_text(const TensorPlan& plan) {
  if (is_exact(plan.coder)) return "exact";
  const bool mixed = plan.allocation.has_value();
  const auto [memories, zero] = std::visit(CoderExtras{mixed}, plan.coder);
  std::string text =
      mixed ? fmt::format("mixed {}", plan.allocation->unit) : fmt::format("{}-bit", code_bits(plan.coder));
  text += fmt::format(" {}{}", coder_name(plan.coder), memories);
  if (!mixed) text += fmt::format(" g{}", group_size(plan.coder));
  text += fmt::format(" {} {}{}", to_string(scale_rule(plan.coder)), to_string(scale_type(plan.coder)), zero);
  if (!plan.center.empty()) text += " centred";
  if (plan.centroids)
    text += fmt::format(" C={}{}{}", plan.centroids->count, plan.centroids->joint ? " joint" : "",
                        plan.centroids->after_rotation ? " after" : "");
  return text;
}

std::string rotation_text(const Rotation& rotation) {
  return fmt::format("{} {} {}{}{}", to_string(rotation.kind), rotation.recipe, to_string(rotation.scope),
                     rotation.order > 0 ? fmt::format(" order {}", rotation.order) : "",
                     rotation.target.empty() ? "" : " " + rotation.target);
}

std::string transform_text(const TensorPlan& plan) { return plan.transform ? plan.transform->kind : "orthogonal"; }

/// Largest condition of all heads; 1 without a transform.
double condition_of(const TensorPlan& plan) {
  if (!plan.transform) return 1.0;
  return *std::max_element(plan.transform->condition.begin(), plan.transform->condition.end());
}

class SideDiffer {
 public:
  /// @param budgets  whether both artifacts have a budget over all layers
  SideDiffer(ArtifactDiff& diff, AllocationDistance& allocation, int& codes, bool budgets)
      : diff_(diff), facts_(diff.differences), allocation_(allocation), codes_(codes), budgets_(budgets) {}

  void compare(const TensorPlan& before, const TensorPlan& after, const LayerGeometry& geometry, int layer, Side side) {
    const std::string where = fmt::format("layer {} {}", layer, name(side));
    const int dim = geometry.dim(side);
    const std::size_t known = diff_.differences.size();
    facts_.compare(where + " codes", coder_text(before), coder_text(after));
    facts_.compare(where + " rotation", rotation_text(before.rotation), rotation_text(after.rotation));
    if (!budgets_) facts_.compare(where + " transform", transform_text(before), transform_text(after));
    codes_ += static_cast<int>(diff_.differences.size() - known);
    // With a budget over all layers, each head may choose its transform, so another transform does not count as other
    // codes.
    if (budgets_) facts_.compare(where + " transform", transform_text(before), transform_text(after));
    const PlanDistance distance = plan_distance(after, before, geometry.num_kv_heads, dim);
    for (const DistanceRow& row : kDistances)
      if (const std::optional<double> value = distance.*(row.value))
        diff_.readings.push_back({row.name, where, {}, *value});
    if (before.transform || after.transform)
      diff_.readings.push_back({"transform.condition", where, condition_of(before), condition_of(after)});
    const bool resized = budgets_ && mean_code_bits(before) != mean_code_bits(after);
    if (before.error && after.error && before.error->metric == after.error->metric)
      diff_.readings.push_back({"layers.calibration_error", where, before.error->after, after.error->after, resized});
    compare_widths(before, after, where, before.rotation.scope == Scope::layer ? 1 : geometry.num_kv_heads, resized);
  }

 private:
  void compare_widths(const TensorPlan& before, const TensorPlan& after, const std::string& where, int heads,
                      bool resized) {
    if (!before.allocation || !after.allocation) return;
    const auto before_bits = allocated_widths(*before.allocation), after_bits = allocated_widths(*after.allocation);
    if (before_bits.size() != after_bits.size()) return;
    const std::vector<float> equal(before_bits.size(), 1.0f);
    const std::vector<float>& energy = before.allocation->block_energy;
    const std::span<const float> scores = energy.size() == before_bits.size() ? energy : equal;
    AllocationDistance side;
    const std::size_t slots = before_bits.size() / static_cast<std::size_t>(heads);
    for (int h = 0; h < heads; ++h) {
      const std::size_t first = static_cast<std::size_t>(h) * slots;
      AllocationDistance head;
      head.add(after_bits.subspan(first, slots), before_bits.subspan(first, slots), scores.subspan(first, slots));
      diff_.readings.push_back(
          {"heads.allocation.hamming", fmt::format("{} head {}", where, h), {}, head.hamming(), resized});
      side.merge(head);
    }
    diff_.readings.push_back({"layers.allocation.hamming", where, {}, side.hamming(), resized});
    diff_.readings.push_back({"layers.allocation.regret", where, {}, side.regret(), resized});
    allocation_.merge(side);
  }

  ArtifactDiff& diff_;
  Facts facts_;
  AllocationDistance& allocation_;
  int& codes_;
  bool budgets_;
};

const LayerPlan* find_layer(const Artifact& artifact, int layer) {
  const auto it = std::find_if(artifact.layers.begin(), artifact.layers.end(),
                               [&](const LayerPlan& plan) { return plan.layer == layer; });
  return it == artifact.layers.end() ? nullptr : &*it;
}

double bits_of(const LayerPlan& plan, const Windows& windows) {
  const LayerGeometry& g = plan.geometry;
  const double v_dim = plan.v ? g.v_head_dim : 0.0;
  const double v_bits = plan.v ? effective_bits(*plan.v, g.v_head_dim, windows, kContext) : 0.0;
  return (g.head_dim * effective_bits(plan.k, g.head_dim, windows, kContext) + v_dim * v_bits) / (g.head_dim + v_dim);
}

void add_sizes(const Artifact& before, const Artifact& after, std::vector<Reading>& readings) {
  const auto mean = [](const Artifact& artifact, const auto& value) {
    double sum = 0.0;
    for (const LayerPlan& plan : artifact.layers) sum += value(plan);
    return sum / static_cast<double>(artifact.layers.size());
  };
  const auto bytes = [](const LayerPlan& plan) { return static_cast<double>(cache_layout(plan).token_bytes()); };
  readings.push_back({"bytes_per_token", "", mean(before, bytes), mean(after, bytes)});
  readings.push_back({"effective_bits", "",
                      mean(before, [&](const LayerPlan& plan) { return bits_of(plan, before.windows); }),
                      mean(after, [&](const LayerPlan& plan) { return bits_of(plan, after.windows); })});
  for (const LayerPlan& plan : after.layers)
    if (const LayerPlan* other = find_layer(before, plan.layer))
      readings.push_back({"layers.bytes_per_token", fmt::format("layer {}", plan.layer), bytes(*other), bytes(plan)});
}

void add_kl(const std::string& prefix, const std::string& where, const Distribution& before, const Distribution& after,
            std::vector<Reading>& readings) {
  const struct {
    const char* name;
    double Distribution::* value;
  } parts[] = {{"mean", &Distribution::mean},
               {"median", &Distribution::median},
               {"p95", &Distribution::p95},
               {"p99", &Distribution::p99},
               {"max", &Distribution::max}};
  for (const auto& part : parts)
    readings.push_back(
        {fmt::format("{}attention_kl.{}", prefix, part.name), where, before.*(part.value), after.*(part.value)});
}

/// The same values of three candidates: of a layer, of a head, or means over layers.
struct Measured {
  const Values &before, &after, &exact;
};

void add_values(const std::string& prefix, const std::string& where, const Measured& values, bool with_kl,
                std::vector<Reading>& readings) {
  for (const MetricRow& row : metric_rows()) {
    if (row.metric == Metric::attention_kl && !with_kl) continue;
    if (std::isnan(value_of(values.exact, row.metric))) continue;
    readings.push_back({fmt::format("{}{}{}", prefix, row.name, row.metric == Metric::attention_kl ? ".mean" : ""),
                        where, value_of(values.before, row.metric), value_of(values.after, row.metric)});
  }
}

/// If the logits are not finite, the attention weights mean nothing, so sound() sets the metrics of weights to NaN.
Values sound(Values values) {
  if (std::isfinite(value_of(values, Metric::logit_rel_mse))) return values;
  for (const Metric metric : {Metric::attention_kl, Metric::top10_overlap})
    values[static_cast<std::size_t>(metric)] = kNaN;
  return values;
}

/// Means over layers that become NaN if any layer has NaN where the metric applies. (CandidateResult::mean skips NaN,
/// which stands for "does not apply".)
Values strict_mean(const CandidateResult& result, const CandidateResult& exact) {
  Values mean = sound(result.mean);
  for (std::size_t l = 0; l < result.layers.size(); ++l) {
    const Values values = sound(result.layers[l].values);
    for (std::size_t m = 0; m < kNumMetrics; ++m)
      if (std::isnan(values[m]) && !std::isnan(exact.layers[l].values[m])) mean[m] = kNaN;
  }
  return mean;
}

/// The distribution, or NaN in all fields if `mean` is NaN, because quantiles of NaN mean nothing.
/// @param mean  attention_kl of the same values
Distribution strict_kl(const Distribution& kl, double mean) {
  return std::isnan(mean) ? Distribution{kNaN, kNaN, kNaN, kNaN, kNaN} : kl;
}

}  // namespace

const std::vector<DiffMetric>& diff_metrics() {
  static const std::vector<DiffMetric> all = [] {
    std::vector<DiffMetric> rows;
    const auto distance = [&](const char* name, const char* summary) { rows.push_back({name, summary, false, true}); };
    const auto level = [&](const char* name, const char* summary) { rows.push_back({name, summary, false, false}); };
    distance("geometry", "facts of model and layers that differ: heads, dimensions, RoPE, layers that are there");
    distance("windows", "1 if sink or recent tokens differ");
    distance("codes", "sides that are coded or rotated in another way");
    for (const DistanceRow& row : kDistances) distance(row.name, row.summary);
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
    for (const std::string prefix : {"", "layers.", "heads."}) {
      const bool of_heads = prefix == "heads.";  // o_proj mixes all heads, so heads have no o_proj_rel_mse
      for (const MetricRow& row : metric_rows())
        if (row.metric != Metric::attention_kl && !(of_heads && row.metric == Metric::o_proj_rel_mse))
          rows.push_back({fmt::format("{}{}", prefix, row.name), prefix.empty() ? std::string(row.summary) : "", true});
      for (const std::string part : {"mean", "median", "p95", "p99", "max"})
        if (!of_heads || part == "mean") rows.push_back({fmt::format("{}attention_kl.{}", prefix, part), "", true});
    }
    return rows;
  }();
  return all;
}

ArtifactDiff diff_artifacts(const Artifact& before, const Artifact& after) {
  ArtifactDiff diff;
  Facts facts(diff.differences);
  facts.compare("model name", printable(before.model.name, 60), printable(after.model.name, 60));
  facts.compare("model fingerprint", printable(before.model.fingerprint, 64), printable(after.model.fingerprint, 64));
  facts.compare("model num_layers", before.model.num_layers, after.model.num_layers);
  const auto numbers = [](const Artifact& artifact) {
    std::string text;
    for (const LayerPlan& plan : artifact.layers) text += fmt::format("{}{}", text.empty() ? "" : " ", plan.layer);
    return text;
  };
  facts.compare("layers", numbers(before), numbers(after));
  AllocationDistance allocation;
  int codes = 0;
  std::vector<std::pair<const LayerPlan*, const LayerPlan*>> comparable;
  for (const LayerPlan& plan : after.layers) {
    const LayerPlan* other = find_layer(before, plan.layer);
    if (other == nullptr) continue;
    const std::string where = fmt::format("layer {}", plan.layer);
    compare_geometry(facts, where, other->geometry, plan.geometry);
    facts.compare(where + " has values", other->v.has_value(), plan.v.has_value());
    const LayerGeometry &a = other->geometry, &b = plan.geometry;
    if (a.num_kv_heads == b.num_kv_heads && a.head_dim == b.head_dim && a.v_head_dim == b.v_head_dim)
      comparable.emplace_back(other, &plan);
  }
  diff.readings.push_back({"geometry", "", {}, static_cast<double>(diff.differences.size())});
  const std::size_t known = diff.differences.size();
  facts.compare("windows", fmt::format("{} sink, {} recent", before.windows.sink_tokens, before.windows.recent_tokens),
                fmt::format("{} sink, {} recent", after.windows.sink_tokens, after.windows.recent_tokens));
  diff.readings.push_back({"windows", "", {}, static_cast<double>(diff.differences.size() - known)});
  facts.compare("method", before.calibration.method, after.calibration.method);
  facts.compare("tool", printable(before.calibration.tool, 40), printable(after.calibration.tool, 40));
  facts.compare("dump", printable(before.calibration.dump_hash, 60), printable(after.calibration.dump_hash, 60));
  facts.compare("tokens", before.calibration.tokens, after.calibration.tokens);
  facts.compare("seed", before.calibration.seed, after.calibration.seed);
  compare_json(facts, "options", before.calibration.options, after.calibration.options);
  SideDiffer sides(diff, allocation, codes,
                   !before.calibration.budget.is_null() && !after.calibration.budget.is_null());
  for (const auto& [other, plan] : comparable) {
    sides.compare(other->k, plan->k, plan->geometry, plan->layer, Side::k);
    if (other->v && plan->v) sides.compare(*other->v, *plan->v, plan->geometry, plan->layer, Side::v);
  }
  diff.readings.push_back({"codes", "", {}, static_cast<double>(codes)});
  if (allocation.slots > 0) {
    diff.readings.push_back({"allocation.hamming", "", {}, allocation.hamming()});
    diff.readings.push_back({"allocation.high_bit_jaccard", "", {}, allocation.high_bit_jaccard()});
    diff.readings.push_back({"allocation.regret", "", {}, allocation.regret()});
  }
  add_sizes(before, after, diff.readings);
  return diff;
}

std::vector<Reading> diff_results(const CandidateResult& before, const CandidateResult& after,
                                  const CandidateResult& exact, bool budgets) {
  std::vector<Reading> readings;
  const Values before_mean = strict_mean(before, exact), after_mean = strict_mean(after, exact);
  const auto kl_of = [](const Distribution& kl, const Values& values) {
    return strict_kl(kl, value_of(values, Metric::attention_kl));
  };
  add_values("", "", {before_mean, after_mean, exact.mean}, false, readings);
  add_kl("", "", kl_of(before.kl, before_mean), kl_of(after.kl, after_mean), readings);
  for (std::size_t l = 0; l < after.layers.size(); ++l) {
    const LayerResult &a = before.layers[l], &b = after.layers[l], &none = exact.layers[l];
    const std::string where = fmt::format("layer {}", b.layer);
    const std::size_t first = readings.size();
    const Values a_values = sound(a.values), b_values = sound(b.values);
    add_values("layers.", where, {a_values, b_values, none.values}, false, readings);
    add_kl("layers.", where, kl_of(a.kl, a_values), kl_of(b.kl, b_values), readings);
    for (std::size_t h = 0; h < b.heads.size(); ++h) {
      const Values a_head = sound(a.heads[h]), b_head = sound(b.heads[h]);
      add_values("heads.", fmt::format("{} head {}", where, h), {a_head, b_head, none.heads[h]}, true, readings);
    }
    const bool resized = budgets && (a.k_code_bits != b.k_code_bits || a.v_code_bits != b.v_code_bits);
    for (std::size_t r = first; r < readings.size(); ++r) readings[r].resized = resized;
  }
  return readings;
}

bool nothing_coded(const CandidateResult& result) {
  bool has_codes = false;
  for (const LayerResult& layer : result.layers) {
    has_codes = has_codes || layer.k_code_bits < 16.0 || layer.v_code_bits < 16.0;
    // These errors are over the tokens that are codes at the end of a sequence; exact tokens have error 0.
    if (value_of(layer.values, Metric::k_rel_mse) != 0.0) return false;
    if (layer.v_code_bits < 16.0 && value_of(layer.values, Metric::v_rel_mse) != 0.0) return false;
  }
  return has_codes;
}

bool needs_codes(const std::string& metric) {
  const auto& all = diff_metrics();
  const auto row = std::find_if(all.begin(), all.end(), [&](const DiffMetric& own) { return own.name == metric; });
  return row != all.end() && row->needs_dump && !metric.ends_with("rope_logit_mae");
}

}  // namespace kvq
