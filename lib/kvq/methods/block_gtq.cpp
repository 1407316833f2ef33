#include <kvq/core/error.h>
#include <kvq/methods/joint_budget.h>
#include <kvq/methods/recipes.h>
#include <kvq/solve/structured.h>

// Block-GTQ (arXiv 2606.24033): widths of 1 to 8 bits for the RoPE blocks of each KV head, by a score of their energy
// and a greedy rule; every run of one width is a group of TurboQuant-MSE codes (norm, rotation, Lloyd-Max). Values:
// TQ-MSE of one width. Where the published code differs from the paper, this file follows the paper: the pairs and
// frequencies are the dump's (not always i, i + D/2), keys are quantized after RoPE, every group is rotated, codebooks
// are exact for the group's dimension, matrices are stored.

namespace kvq {

namespace {

/// TurboQuant-MSE of one width: a random orthogonal matrix, or random signs and a Hadamard, which needs no matrix.
Rotation tq_rotation(const RotationRequest& request) {
  Rotation rotation;
  const bool hadamard = request.options.mixing == "hadamard" && hadamard_order(request.dim()) == request.dim();
  rotation.kind = hadamard ? RotationKind::block_hadamard : RotationKind::dense;
  rotation.order = hadamard ? request.dim() : 0;
  rotation.recipe = hadamard ? "S*H" : "Haar";
  for (int h = 0; h < request.heads(); ++h) {
    const int stream = kvq::stream(h, request.side);
    if (hadamard) {
      const auto signs = random_signs(request.dim(), request.options.seed, request.stats.layer, stream);
      rotation.signs.insert(rotation.signs.end(), signs.begin(), signs.end());
    } else {
      const auto matrix = haar_matrix(request.dim(), request.options.seed, request.stats.layer, stream);
      rotation.matrix.insert(rotation.matrix.end(), matrix.begin(), matrix.end());
    }
  }
  return rotation;
}

TensorPlan gtq_side(const LayerStats& stats, const Options& options, Side side) {
  const SideOptions& asked = options.side(side);
  if (stays_exact(options, stats.layer, side)) return exact_plan(options);
  if (asked.allocate == Allocate::none) return plan_side(stats, options, side, tq_rotation, 0);
  const auto heads = static_cast<std::size_t>(options.scope == Scope::layer ? 1 : stats.geometry.num_kv_heads);
  return allocate_side(SideView(stats, options, side), options, {asked.bits, asked.row_bytes},
                       std::vector<Allocate>(heads, asked.allocate), true);
}

Decision gtq_decide(const StatsSource& source, const Options& options, const LayerDone& done) {
  if (options.budget_bits || options.budget_bytes) return decide_with_budget(source, options, done);
  Decision decision;
  for (std::size_t i = 0; i < source.size(); ++i) {
    const auto stats = source.load(i);
    LayerPlan plan{
        .layer = stats->layer, .geometry = stats->geometry, .k = gtq_side(*stats, options, Side::k), .v = {}};
    if (stats->has_values) plan.v = gtq_side(*stats, options, Side::v);
    validate(plan);
    decision.plans.push_back(std::move(plan));
    if (done) done(i);
  }
  return decision;
}

void tq_defaults(Options& options) {
  options.k.coder = options.v.coder = CoderKind::codebook;
  options.k.rule = options.v.rule = ScaleRule::norm;
}

void gtq_defaults(Options& options) {
  tq_defaults(options);
  options.k.allocate = Allocate::rope_block;
}

}  // namespace

Method block_gtq_method() {
  return {
      .name = "block-gtq",
      .summary = "RoPE-block bit allocation over TurboQuant-MSE codes",
      .flags = {"--score", "--min-bits", "--max-bits", "--mixing", "--k-allocation", "--v-allocation", "--row-bytes-k",
                "--row-bytes-v", "--joint", "--budget-bits", "--budget-bytes", "--uniform-layout",
                "--budget-per-layer"},
      .set_defaults = gtq_defaults,
      .needs = allocation_needs,
      .tensors = allocation_tensors,
      .decide = gtq_decide,
  };
}

Method tq_mse_method() {
  return {
      .name = "tq-mse",
      .summary = "TurboQuant-MSE: random rotation, exact Lloyd-Max codes, norm kept",
      .flags = {"--mixing"},
      .set_defaults = tq_defaults,
      .needs = common_needs,
      .tensors = allocation_tensors,
      .decide = gtq_decide,
  };
}

}  // namespace kvq
