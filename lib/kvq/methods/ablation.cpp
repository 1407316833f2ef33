#include <kvq/methods/joint_budget.h>
#include <kvq/plan/layer_pages.h>
#include <kvq/plan/serving.h>

#include <fmt/format.h>

#include <array>
#include <utility>

namespace kvq {

namespace {

constexpr std::array kTargets = {Target::runtime, Target::free};

/// Bytes of a coded row in pages: mean over the rows of a token.
double mean_row_bytes(const std::vector<LayerPlan>& plans) {
  double bytes = 0.0, rows = 0.0;
  for (const LayerPlan& plan : plans)
    for (const Side side : kSides)
      if (const TensorPlan* of = plan.side(side); of != nullptr && !is_exact(of->coder)) {
        bytes += page_row_bytes(*of, plan.geometry.dim(side)) * plan.geometry.num_kv_heads;
        rows += plan.geometry.num_kv_heads;
      }
  return bytes / rows;
}

TargetRow target_row(Target target, const Decision& decision, const StatsSource& source, Backend& backend) {
  TargetRow row{
      .target = target,
      .report = decision.budget,
      .row_bytes = mean_row_bytes(decision.plans),
      .layers = static_cast<int>(decision.plans.size()),
      .held_out = held_out_report(source, decision.plans, backend),
  };
  for (const LayerPlan& plan : decision.plans)
    if (served_by(plan, Activation::bf16).by(KernelVerb::decode) == KernelKind::tuned) ++row.tuned_layers;
  return row;
}

}  // namespace

Ablation ablate(const StatsSource& source, const Options& options, Backend& backend) {
  // From Block-GTQ as its paper has it, at the same bits in every layer and side, one ingredient after the other.
  Options o = options;
  const double bits = options.budget_bits.value_or(2.0);
  if (options.budget_bytes) {  // equal rows for all
    const LayerGeometry& g = source.load(0)->geometry;
    o.k.row_bytes = o.v.row_bytes =
        static_cast<int>(*options.budget_bytes / (2.0 * g.num_kv_heads)) / kRowWord * kRowWord;
  }
  o.budget_bits = o.budget_bytes = std::nullopt;
  o.uniform_layout = o.budget_per_layer = o.choose_basis = o.choose_transform = o.coder_law = false;
  o.score = BlockScore::qk_avg;
  o.k.allocate = Allocate::rope_block;
  o.v.allocate = Allocate::none;
  for (SideOptions* side : {&o.k, &o.v}) {
    side->bits = bits;
    side->coder = CoderKind::codebook;
    side->rule = ScaleRule::rms;
    side->center = false;
  }
  std::vector<AblationRow> rows;
  const auto add = [&](const std::string& name, const Options& with) {
    rows.push_back({name, *decide_with_budget(source, with, {.backend = backend}).budget});
  };
  add("Block-GTQ keys, TQ-MSE values", o);
  o.k.rule = o.v.rule = ScaleRule::norm;
  add("+ norm kept", o);
  if (options.k.center || options.v.center) {
    o.k.center = options.k.center;
    o.v.center = options.v.center;
    add("+ centred", o);
  }
  if (options.score != o.score) {
    o.score = options.score;
    add(fmt::format("+ score {}", to_string(o.score)), o);
  }
  if (options.k.coder != CoderKind::codebook || options.v.coder != CoderKind::codebook) {
    o.k.coder = options.k.coder;
    o.v.coder = options.v.coder;
    add(fmt::format("+ {} codes", to_string(o.k.coder)), o);
  }
  if (options.coder_law) {
    o.coder_law = true;
    add("+ widths by the coder's own law", o);
  }
  if (options.choose_basis) {
    o.choose_basis = true;
    o.v.allocate = options.v.allocate;
    add("+ basis chosen head by head", o);
  }
  if (options.choose_transform) {
    o.choose_transform = true;
    add("+ transforms chosen head by head", o);
  }
  const std::vector<Decision> decisions = decide_targets(source, options, kTargets, {.backend = backend});
  Ablation ablation{.ingredients = std::move(rows), .targets = {}};
  for (std::size_t i = 0; i < kTargets.size(); ++i) {
    ablation.targets.push_back(target_row(kTargets[i], decisions[i], source, backend));
    if (kTargets[i] == options.target)
      ablation.ingredients.push_back({"+ one budget for layers and sides", *decisions[i].budget});
  }
  return ablation;
}

Ablation compare_targets(const StatsSource& source, const Options& options, Backend& backend, Decide decide) {
  std::vector<Decision> decisions;
  if (options.budget_bits || options.budget_bytes) {  // sizes are tried once
    decisions = decide_targets(source, options, kTargets, {.backend = backend});
  } else {
    for (const Target target : kTargets) {
      Options with = options;
      with.target = target;
      decisions.push_back(decide(source, with, {.backend = backend}));
    }
  }
  Ablation ablation;
  for (std::size_t i = 0; i < kTargets.size(); ++i)
    ablation.targets.push_back(target_row(kTargets[i], decisions[i], source, backend));
  return ablation;
}

}  // namespace kvq
