#include <kvq/core/error.h>
#include <kvq/methods/joint_budget.h>
#include <kvq/methods/layers.h>
#include <kvq/methods/recipes.h>
#include <kvq/methods/width_options.h>
#include <kvq/plan/kernel_rows.h>
#include <kvq/plan/segment_rows.h>
#include <kvq/plan/serving.h>
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
  const bool hadamard = request.options.mixing == Mixing::hadamard && hadamard_order(request.dim()) == request.dim();
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

/// @param max_bits  SideBudget::max_bits
TensorPlan gtq_side(const LayerStats& stats, const Options& options, Side side, Backend& backend, int max_bits = 0) {
  const SideOptions& asked = options.side(side);
  if (stays_exact(options, stats.layer, side)) return exact_plan(options);
  if (asked.allocate == Allocate::none) return plan_side(stats, options, side, tq_rotation, 0, backend);
  const auto heads = static_cast<std::size_t>(options.scope == Scope::layer ? 1 : stats.geometry.num_kv_heads);
  return allocate_side(SideView(stats, options, side), options, {asked.bits, asked.row_bytes, max_bits},
                       std::vector<Allocate>(heads, asked.allocate), true, backend);
}

bool is_decode_tuned(const LayerPlan& plan) {
  return plan.v && served_by(plan, Activation::bf16, kernel_rows()).by(KernelVerb::decode) == KernelKind::tuned;
}

/// Target::runtime without a budget: if no tuned kernel decodes the layer, but one does with narrower widths of keys,
/// takes keys of such widths.
void narrow_keys(const LayerStats& stats, const Options& options, Backend& backend, LayerPlan& plan) {
  if (!plan.k.allocation || options.max_bits <= kMostLevelBits || options.min_bits > kMostLevelBits ||
      options.k.bits > kMostLevelBits || is_decode_tuned(plan))
    return;
  LayerPlan narrow = plan;
  narrow.k = gtq_side(stats, options, Side::k, backend, kMostLevelBits);
  if (is_decode_tuned(narrow)) plan = std::move(narrow);
}

Decision gtq_decide(const StatsSource& source, const Options& options, const MethodContext& context) {
  if (options.budget_bits || options.budget_bytes) return decide_with_budget(source, options, context);
  return plan_layers(
      source, context,
      [&](const LayerStats& stats, Side side) { return gtq_side(stats, options, side, context.backend); },
      [&](const LayerStats& stats, LayerPlan& plan) {
        if (options.target == Target::runtime) narrow_keys(stats, options, context.backend, plan);
      });
}

Ablation gtq_ablate(const StatsSource& source, const Options& options, Backend& backend) {
  return compare_targets(source, options, backend, gtq_decide);
}

void tq_defaults(Options& options) {
  options.k.coder = options.v.coder = CoderKind::codebook;
  options.k.rule = options.v.rule = ScaleRule::norm;
}

void gtq_defaults(Options& options) {
  tq_defaults(options);
  options.k.allocate = Allocate::rope_block;
}

constexpr const char* kJoint = "--joint";

/// A switch that other options explain: settle_joint() turns the switch and --bits into a budget.
OptionSpec joint_option() {
  return {
      .text = {kJoint, option_group::kBudgets,
               "block-gtq: spend one budget, decided by the measured error of attention's output"},
      .kind = OptionKind::toggle,
  };
}

OptionSpec row_bytes_option(const char* flag, const char* help, Sides sides) {
  return side_option(
      {.text = {flag, option_group::kWidths, help}, .kind = OptionKind::integer, .integers = {4, 4096}}, sides,
      [](SideOptions& s, const OptionValue& v) { s.row_bytes = static_cast<int>(std::get<std::int64_t>(v)); },
      {.key = "row_bytes", .value = [](const SideOptions& s) { return s.row_bytes > 0 ? Json(s.row_bytes) : Json(); }});
}

/// The widths of kvq, --row-bytes before --mixing; its budgets, --joint after the sizes.
std::vector<OptionSpec> gtq_options() {
  std::vector<OptionSpec> all = width_options();
  all.insert(all.end() - 1,
             {row_bytes_option("--row-bytes-k",
                               "fill rows of this many bytes (codes, scales, padding) instead of --bits", Sides::k),
              row_bytes_option("--row-bytes-v", "the same for values, with --v-allocation channel", Sides::v)});
  std::vector<OptionSpec> budgets = budget_options();
  budgets.insert(budgets.begin() + 2, joint_option());
  for (OptionSpec& spec : budgets) all.push_back(std::move(spec));
  return all;
}

void check_row_bytes(const Options& options) {
  for (const Side side : kSides)
    if (options.side(side).row_bytes > 0 && options.side(side).allocate == Allocate::none)
      throw Error{ErrorKind::usage, fmt::format("--row-bytes-{}: this side has one width for all channels", name(side)),
                  "--v-allocation channel gives values widths of their own"};
}

/// With --joint, --bits is the budget, and a side has bits of its own only if they are 16.
void settle_joint(Options& options, const GivenOptions& given) {
  for (const Side side : kSides) {
    const std::string bits_flag = fmt::format("--bits-{}", name(side));
    if (given.value<double>(bits_flag).value_or(16.0) != 16.0 || given.has(fmt::format("--row-bytes-{}", name(side))))
      throw Error{ErrorKind::usage,
                  fmt::format("--joint spends one budget: --bits-{0} other than 16 and --row-bytes-{0} have no meaning",
                              name(side)),
                  "use --bits, --budget-bits or --budget-bytes"};
    if (!given.has(bits_flag)) options.side(side).bits = SideOptions{}.bits;
  }
  const auto bits = given.value<double>("--bits");
  const bool has_budget = options.budget_bits || options.budget_bytes;
  if (bits && has_budget) throw Error{ErrorKind::usage, "--bits and a budget: expected one of both with --joint"};
  if (bits && !(*bits >= 1 && *bits <= 8))
    throw Error{ErrorKind::usage, fmt::format("--joint --bits: expected 1 to 8, found {}", *bits)};
  if (!has_budget) options.budget_bits = bits.value_or(2.0);
}

void gtq_settle(const Method& method, Options& options, const GivenOptions& given) {
  check_row_bytes(options);
  settle_widths(method, options, given);
  settle_budget(options, given);
  if (given.is_on(kJoint)) return settle_joint(options, given);
  const bool has_budget = options.budget_bits || options.budget_bytes;
  if (has_budget || options.uniform_layout || options.budget_per_layer)
    throw Error{ErrorKind::usage, "--budget-bits, --budget-bytes, --uniform-layout and --budget-per-layer need --joint",
                "or --bits, --row-bytes-k and --row-bytes-v for each layer alike"};
}

}  // namespace

Method block_gtq_method() {
  return {
      .name = "block-gtq",
      .summary = "RoPE-block bit allocation over TurboQuant-MSE codes",
      .options = gtq_options(),
      .set_defaults = gtq_defaults,
      .settle = gtq_settle,
      .needs = allocation_needs,
      .tensors = allocation_tensors,
      .decide = gtq_decide,
      .ablate = gtq_ablate,
  };
}

Method tq_mse_method() {
  return {
      .name = "tq-mse",
      .summary = "TurboQuant-MSE: random rotation, exact Lloyd-Max codes, norm kept",
      .options = {mixing_option()},
      .set_defaults = tq_defaults,
      .needs = common_needs,
      .tensors = allocation_tensors,
      .decide = gtq_decide,
  };
}

}  // namespace kvq
