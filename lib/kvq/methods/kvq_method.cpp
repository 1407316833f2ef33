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

std::vector<LayerPlan> kvq_decide(const StatsSource& source, const Options& options, const LayerDone& done) {
  return decide_with_budget(source, options, done).plans;
}

}  // namespace

Method kvq_method() {
  return {"kvq", "all of it: product score, trellis codes, one measured budget over layers and sides", kvq_defaults,
          allocation_needs, kvq_decide};
}

}  // namespace kvq
