#include <kvq/methods/joint_budget.h>
#include <kvq/methods/recipes.h>

// The method `kvq`: centered keys and values; head by head the best of three bases, channels in the coordinates of klt,
// RoPE blocks scored by the product of query and key energy, or the head rotated as a whole; widths from 0 bits on;
// trellis codes whose scale keeps the norm; and one budget for all layers and sides, decided by the error of
// attention's output on held-out tokens, weighted by the loss's curvature if the dump has it.

namespace kvq {

namespace {

void kvq_defaults(Options& options) {
  for (SideOptions* side : {&options.k, &options.v}) {
    side->coder = CoderKind::trellis;
    side->rule = ScaleRule::norm;
    side->center = true;
  }
  options.k.allocate = Allocate::rope_block;
  options.v.allocate = Allocate::channel;
  options.score = "qk_energy_product";
  options.mixing = "hadamard";
  options.coder_law = true;
  options.choose_basis = true;
  options.choose_transform = true;
  options.min_bits = 0;
  options.budget_bits = 2.0;
  options.max_bits = 8;
}

}  // namespace

Method kvq_method() {
  return {
      .name = "kvq",
      .summary = "all of it: product score, trellis codes, one measured budget over layers and sides",
      .flags = {"--score", "--min-bits", "--max-bits", "--mixing", "--k-allocation", "--v-allocation", "--budget-bits",
                "--budget-bytes", "--uniform-layout", "--budget-per-layer", "--report-ablation"},
      .set_defaults = kvq_defaults,
      .needs = allocation_needs,
      .tensors = allocation_tensors,
      .decide = decide_with_budget,
  };
}

}  // namespace kvq
