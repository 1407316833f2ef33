#include <kvq/core/error.h>
#include <kvq/methods/joint_budget.h>
#include <kvq/methods/recipes.h>
#include <kvq/methods/width_options.h>

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
  options.score = BlockScore::qk_energy_product;
  options.mixing = Mixing::hadamard;
  options.scales = ScaleScope::row;
  options.coder_law = true;
  options.choose_basis = true;
  options.choose_transform = true;
  options.min_bits = 0;
  options.budget_bits = 2.0;
  options.weigh = Weigh::bytes;
  options.max_bits = 8;
}

/// Channels may get width 0 only with klt, because only the basis of klt has channels that are worth nothing. Without
/// klt the least width is 1.
void settle_least_width(Options& options, const GivenOptions& given) {
  const bool klt = options.choose_transform || options.k.transform == TransformKind::klt ||
                   options.v.transform == TransformKind::klt;
  if (!klt && !given.has("--min-bits")) options.min_bits = 1;
}

void kvq_settle(const Method& method, Options& options, const GivenOptions& given) {
  for (const char* flag : {"--bits", "--bits-k", "--bits-v"})
    if (given.has(flag))
      throw Error{ErrorKind::usage, "--method kvq spends one budget: --bits and --row-bytes have no meaning",
                  "use --budget-bits or --budget-bytes"};
  settle_widths(method, options, given);
  settle_least_width(options, given);
  settle_budget(options, given);
}

std::vector<OptionSpec> kvq_options() {
  std::vector<OptionSpec> all = width_options();
  for (OptionSpec& spec : budget_options()) all.push_back(std::move(spec));
  return all;
}

}  // namespace

Method kvq_method() {
  return {
      .name = "kvq",
      .summary = "all of it: product score, trellis codes, one measured budget over layers and sides",
      .options = kvq_options(),
      .balanced_has_one_width = true,
      .set_defaults = kvq_defaults,
      .settle = kvq_settle,
      .needs = allocation_needs,
      .tensors = allocation_tensors,
      .decide = decide_with_budget,
      .ablate = ablate,
  };
}

}  // namespace kvq
