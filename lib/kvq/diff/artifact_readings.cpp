#include <kvq/core/text.h>
#include <kvq/diff/artifact_readings.h>
#include <kvq/diff/facts.h>
#include <kvq/diff/verification.h>
#include <kvq/eval/plan_distance.h>
#include <kvq/plan/allocation_stats.h>

#include <fmt/format.h>

#include <algorithm>

namespace kvq {

namespace {

constexpr std::int64_t kContext = 32768;  // at which effective bits are compared

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
    // Artifacts of today have the search in integers.
    if (std::ranges::any_of(coder.taps, [](auto& taps) { return taps.search == TrellisSearch::binary32; }))
      memories += fmt::format(" (search {})", to_string(TrellisSearch::binary32));
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
  text += fmt::format(" {} {}{}{}", to_string(scale_rule(plan.coder)), to_string(scale_type(plan.coder)),
                      mixed && plan.allocation->has_row_scale() ? "/row" : "", zero);
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
  /// @param budgets    whether both artifacts have a budget over all layers
  /// @param same_data  whether errors that the calibrations state are of the same tokens
  SideDiffer(ArtifactDiff& diff, AllocationDistance& allocation, int& codes, bool budgets, bool same_data)
      : diff_(diff),
        facts_(diff.differences),
        allocation_(allocation),
        codes_(codes),
        budgets_(budgets),
        same_data_(same_data) {}

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
    if (same_data_ && before.error && after.error && before.error->metric == after.error->metric)
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
  bool budgets_, same_data_;
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

std::string layer_numbers(const Artifact& artifact) {
  std::string text;
  for (const LayerPlan& plan : artifact.layers) text += fmt::format("{}{}", text.empty() ? "" : " ", plan.layer);
  return text;
}

/// Equal fingerprints say that both are of one model. Its name then says only where a dump found the model: a hub id, a
/// folder.
bool known_to_be_one_model(const Artifact& before, const Artifact& after) {
  return !before.model.fingerprint.empty() && before.model.fingerprint == after.model.fingerprint;
}

void compare_models(const Artifact& before, const Artifact& after, Facts& facts) {
  if (!known_to_be_one_model(before, after))
    facts.compare("model name", printable(before.model.name, 60), printable(after.model.name, 60));
  facts.compare("model fingerprint", printable(before.model.fingerprint, 64), printable(after.model.fingerprint, 64));
  facts.compare("model num_layers", before.model.num_layers, after.model.num_layers);
  facts.compare("layers", layer_numbers(before), layer_numbers(after));
}

using LayerPair = std::pair<const LayerPlan*, const LayerPlan*>;

/// Compares the geometry of the layers that both artifacts have.
/// @return  the layers whose plans have equal sizes
std::vector<LayerPair> compare_layers(const Artifact& before, const Artifact& after, Facts& facts) {
  std::vector<LayerPair> comparable;
  for (const LayerPlan& plan : after.layers) {
    const LayerPlan* other = find_layer(before, plan.layer);
    if (other == nullptr) continue;
    const std::string where = fmt::format("layer {}", plan.layer);
    facts.compare_geometry(where, other->geometry, plan.geometry);
    facts.compare(where + " has values", other->v.has_value(), plan.v.has_value());
    const LayerGeometry &a = other->geometry, &b = plan.geometry;
    if (a.num_kv_heads == b.num_kv_heads && a.head_dim == b.head_dim && a.v_head_dim == b.v_head_dim)
      comparable.emplace_back(other, &plan);
  }
  return comparable;
}

std::string windows_text(const Windows& windows) {
  return fmt::format("{} sink, {} recent", windows.sink_tokens, windows.recent_tokens);
}

void compare_calibrations(const Provenance& before, const Provenance& after, Facts& facts) {
  facts.compare("method", before.method, after.method);
  facts.compare("tool", printable(before.tool, 40), printable(after.tool, 40));
  facts.compare("dump", printable(before.dump_hash, 60), printable(after.dump_hash, 60));
  facts.compare("tokens", before.tokens, after.tokens);
  facts.compare("seed", before.seed, after.seed);
  facts.compare_json("options", before.options, after.options);
}

void add_allocation(const AllocationDistance& allocation, std::vector<Reading>& readings) {
  if (allocation.slots == 0) return;
  readings.push_back({"allocation.hamming", "", {}, allocation.hamming()});
  readings.push_back({"allocation.high_bit_jaccard", "", {}, allocation.high_bit_jaccard()});
  readings.push_back({"allocation.regret", "", {}, allocation.regret()});
}

}  // namespace

ArtifactDiff diff_artifacts(const Artifact& before, const Artifact& after) {
  ArtifactDiff diff;
  diff.readings = lost_golden_rows(before, after);
  Facts facts(diff.differences);
  compare_models(before, after, facts);
  const std::vector<LayerPair> comparable = compare_layers(before, after, facts);
  const std::size_t known = diff.differences.size();
  diff.readings.push_back(
      {"geometry", known == 0 ? "" : diff.differences.front().what, {}, static_cast<double>(known)});
  if (known_to_be_one_model(before, after))
    facts.compare("model name", printable(before.model.name, 60), printable(after.model.name, 60));
  const std::size_t described = diff.differences.size();
  facts.compare("windows", windows_text(before.windows), windows_text(after.windows));
  diff.readings.push_back({"windows", "", {}, static_cast<double>(diff.differences.size() - described)});
  compare_calibrations(before.calibration, after.calibration, facts);
  AllocationDistance allocation;
  int codes = 0;
  SideDiffer sides(diff, allocation, codes, !before.calibration.budget.is_null() && !after.calibration.budget.is_null(),
                   same_data(before, after));
  for (const auto& [other, plan] : comparable) {
    sides.compare(other->k, plan->k, plan->geometry, plan->layer, Side::k);
    if (other->v && plan->v) sides.compare(*other->v, *plan->v, plan->geometry, plan->layer, Side::v);
  }
  diff.readings.push_back({"codes", "", {}, static_cast<double>(codes)});
  add_allocation(allocation, diff.readings);
  add_sizes(before, after, diff.readings);
  return diff;
}

bool same_data(const Artifact& before, const Artifact& after) {
  const Provenance &a = before.calibration, &b = after.calibration;
  return a.dump_hash == b.dump_hash && a.tokens == b.tokens && a.sequences == b.sequences;
}

bool geometries_differ(const ArtifactDiff& diff) {
  return std::any_of(diff.readings.begin(), diff.readings.end(),
                     [](const Reading& reading) { return reading.metric == "geometry" && reading.after > 0.0; });
}

std::span<const DistanceRow> distance_rows() { return kDistances; }

}  // namespace kvq
