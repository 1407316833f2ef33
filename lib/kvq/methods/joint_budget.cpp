#include <kvq/core/error.h>
#include <kvq/methods/joint_budget.h>
#include <kvq/methods/layer_judge.h>
#include <kvq/methods/layers.h>
#include <kvq/methods/size_search.h>
#include <kvq/plan/layer_pages.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

namespace kvq {

namespace {

/// Basis in which a head's channels get widths: its coordinates (`transform`), and what has one width (`allocate`).
struct Basis {
  Allocate allocate = Allocate::none;
  TransformKind transform = TransformKind::orthogonal;
};
using Bases = std::vector<Basis>;  ///< of each entry of the scope

/// One side of a layer in the coordinates of some transforms, and the plans in them.
struct PlannedView {
  PlannedView(HeadTransforms& transforms, const std::vector<TransformKind>& kinds, const Options& options,
              Backend& backend)
      : view(transforms, kinds), allocator(view, options, backend) {}
  const SideView view;
  SideAllocator allocator;
};

/// Views of one side by the transforms of its heads, made when they are first asked for.
class Views {
 public:
  Views(const LayerStats& stats, const Options& options, Side side, Backend& backend)
      : options_(options), backend_(backend), transforms_(stats, options, side) {}
  SideAllocator& of(const Bases& bases) {
    std::vector<TransformKind> kinds;
    for (const Basis& basis : bases) kinds.push_back(basis.transform);
    return views_.try_emplace(kinds, transforms_, kinds, options_, backend_).first->second.allocator;
  }

 private:
  const Options& options_;
  Backend& backend_;
  HeadTransforms transforms_;
  std::map<std::vector<TransformKind>, PlannedView> views_;
};

std::vector<Allocate> allocations(const Bases& bases) {
  std::vector<Allocate> how;
  for (const Basis& basis : bases) how.push_back(basis.allocate);
  return how;
}

/// One side of one layer, with the sizes tried.
struct BudgetUnit {
  SizedSide sized;           ///< moves to Planner::sized_ once all is tried
  double channels = 0.0;     ///< of all heads
  double scale_bytes = 0.0;  ///< of one scale for each head
  double whole_bytes = 0.0;  ///< of pages if codes have the budget's whole bits: rows are whole words
  std::vector<SideBudget> budgets;
  std::vector<Bases> bases;           ///< per budget
  std::vector<OutputChange> changes;  ///< per budget
  std::vector<double> bits, bytes;    ///< per budget: code bits of a token, bytes of a token
};

/// Mean bits at which a side is tried, around the budget: in steps of 1/4 up to 4, of 1/2 up to 5, then of 1.
std::vector<double> bit_ladder(const Options& options, double around) {
  std::vector<double> ladder;
  double bits = std::max(1, options.min_bits);
  while (bits <= options.max_bits + 1e-9) {
    if (ladder.empty() ? bits >= around - 1.5 : bits <= around + 2.5) ladder.push_back(bits);
    bits += bits < 4.0 ? 0.25 : bits < 5.0 ? 0.5 : 1.0;
  }
  if (ladder.empty()) ladder.push_back(options.max_bits);
  if (options.min_bits == 0) ladder.insert(ladder.begin(), 0.5);
  return ladder;
}

/// The average bits that a budget leaves to a side.
double around(const Options& options) {
  if (options.budget_bits) return *options.budget_bits;
  return 3.0;
}

class Planner {
 public:
  Planner(const StatsSource& source, const Options& options, const MethodContext& context)
      : source_(source), options_(options), context_(context) {}

  /// Tries all sizes. Targets do not differ in what is tried.
  void try_everything() {
    for_each_layer(
        context_.backend, source_.size(), [&](std::size_t i) { return try_layer(i); },
        [&](std::size_t i, LayerTrials tried) {
          exact_bytes_of_.push_back(tried.exact_bytes);
          exact_bytes_ += tried.exact_bytes;
          if (!tried.units.empty()) metric_ = tried.metric, tokens_ = tried.tokens;
          for (BudgetUnit& unit : tried.units) {
            channels_ += unit.channels;
            scale_bytes_ += unit.scale_bytes, whole_bytes_ += unit.whole_bytes;
            sized_.push_back(std::move(unit.sized));
            units_.push_back(std::move(unit));
          }
          if (context_.done) context_.done(i);
        });
    if (units_.empty()) throw Error{ErrorKind::usage, "nothing is coded: all layers and sides are exact"};
    if (joint() && metric_ == "nll") weigh_layers();
  }

  /// The best of what was tried.
  Decision decide(Target target) const {
    const Selection selection = select(target);
    return {build(selection.chosen), report(selection)};
  }

 private:
  static constexpr double kExactBytes = 2.0;  ///< of a channel in 16 bit

  static double channels_of(const LayerStats& stats, Side side) {
    return static_cast<double>(stats.geometry.dim(side)) * stats.geometry.num_kv_heads;
  }
  bool joint() const { return options_.budget_bits || options_.budget_bytes; }
  /// Whether choices are compared by bytes in pages.
  bool weighs_bytes() const { return options_.budget_bytes || options_.weigh == Weigh::bytes; }
  bool by_rows() const { return options_.budget_bytes || options_.uniform_layout; }

  std::vector<SideBudget> ladder(const LayerStats& stats, Side side) const {
    if (!joint()) return {{options_.side(side).bits, options_.side(side).row_bytes}};
    const int dim = stats.geometry.dim(side);
    std::vector<SideBudget> budgets;
    if (by_rows()) {
      const double middle = options_.budget_bits ? *options_.budget_bits * dim / 8 + 6
                                                 : *options_.budget_bytes / (2.0 * stats.geometry.num_kv_heads);
      const int scale = scale_bytes(options_.side(side).scale_type),
                codes = (dim * std::max(1, options_.min_bits) + 7) / 8;
      const int least =
          options_.scales == ScaleScope::row ? round_up(codes, kRowWord) + scale : round_up(codes + scale, kRowWord);
      const int step = std::max(4, dim / 32 / 4 * 4);
      budgets.push_back({0.0, least});  // if this alone is too large, search_budget() says so
      for (int bytes = least + step; bytes <= middle * 2 + 8 && bytes <= dim * options_.max_bits / 8 + 16;
           bytes += step)
        budgets.push_back({0.0, bytes});
    } else {
      for (const double bits : bit_ladder(options_, around(options_))) budgets.push_back({bits, 0});
    }
    return budgets;
  }

  Bases bases_of(Side side) const {
    const SideOptions& asked = options_.side(side);
    Bases bases{{asked.allocate, asked.transform}};
    if (options_.choose_transform) bases.push_back({Allocate::channel, TransformKind::klt});
    if (options_.choose_basis && asked.allocate != Allocate::none) bases.push_back({Allocate::none, asked.transform});
    return bases;
  }

  /// One budget tried in some bases: the plan's sizes, and the change of the outputs for each head.
  struct Trial {
    Bases bases;
    double bits = 0.0, bytes = 0.0;
    SideFormat format;
    std::vector<OutputChange> changes;
  };
  Trial trial(const LayerStats& stats, Views& views, const LayerJudge& judge, Side side, const SideBudget& budget,
              const Bases& bases) const {
    const TensorPlan plan = views.of(bases).plan(budget, allocations(bases), false);
    const int dim = stats.geometry.dim(side);
    const double kv_heads = stats.geometry.num_kv_heads;
    return {bases, mean_code_bits(plan) * dim * kv_heads, page_row_bytes(plan, dim) * kv_heads,
            side_format(plan, stats.geometry.num_kv_heads, dim), judge.changes(plan, side)};
  }

  /// Tries the bases at this budget. Returns the trial in which each head has its cheapest basis.
  Trial best_trial(const LayerStats& stats, Views& views, const LayerJudge& judge, Side side,
                   const SideBudget& budget) const {
    const auto heads = static_cast<std::size_t>(options_.scope == Scope::layer ? 1 : stats.geometry.num_kv_heads);
    const Bases bases = bases_of(side);
    std::vector<Trial> trials;
    std::vector<std::size_t> best(heads, 0);
    std::vector<double> least(heads, std::numeric_limits<double>::infinity());
    for (const Basis& base : bases) {
      trials.push_back(trial(stats, views, judge, side, budget, Bases(heads, base)));
      const std::vector<OutputChange>& changes = trials.back().changes;
      for (std::size_t h = 0; h < heads; ++h) {
        double cost = 0.0;  // of head h, or of all heads if they share one basis
        for (std::size_t member = 0; member < changes.size(); ++member)
          if (heads == 1 || member == h)
            cost += judge.has_curvature() ? changes[member].curved : changes[member].squared;
        if (cost >= least[h]) continue;
        least[h] = cost;
        best[h] = trials.size() - 1;
      }
    }
    if (std::all_of(best.begin(), best.end(), [&](std::size_t base) { return base == best.front(); }))
      return std::move(trials[best.front()]);
    Bases mixed;
    for (const std::size_t base : best) mixed.push_back(bases[base]);
    return trial(stats, views, judge, side, budget, mixed);
  }

  /// Adds a side's choices. Bases are compared at the middle of each third of the ladder, because the best basis at low
  /// rates may differ from the best basis at high rates.
  void try_ladder(const LayerStats& stats, const LayerJudge& judge, BudgetUnit& unit) const {
    constexpr std::size_t kParts = 3;
    const Side side = unit.sized.side;
    Views views(stats, options_, side, context_.backend);
    const std::size_t steps = unit.budgets.size(), parts = std::min(kParts, steps);
    for (std::size_t part = 0; part < parts; ++part) {
      const std::size_t first = part * steps / parts, end = (part + 1) * steps / parts;
      const std::size_t middle = (first + end) / 2;
      const Trial best = best_trial(stats, views, judge, side, unit.budgets[middle]);
      for (std::size_t i = first; i < end; ++i)
        add_choice(unit, judge, i == middle ? best : trial(stats, views, judge, side, unit.budgets[i], best.bases));
    }
  }

  void add_choice(BudgetUnit& unit, const LayerJudge& judge, const Trial& tried) const {
    OutputChange total;
    for (const OutputChange& change : tried.changes) total += change;
    unit.bases.push_back(tried.bases);
    unit.changes.push_back(total);
    unit.bits.push_back(tried.bits);
    unit.bytes.push_back(tried.bytes);
    unit.sized.choices.push_back(
        {weighs_bytes() ? tried.bytes : tried.bits, judge.has_curvature() ? total.curved : total.squared});
    // Tuned kernels for mixed widths take rows with one scale. Where segments have scales, rows of one segment are the
    // exception, and no reason to choose them.
    if (options_.scales == ScaleScope::row) unit.sized.formats.push_back(tried.format);
  }

  /// BudgetUnit::whole_bytes.
  double whole_bytes(const LayerStats& stats, Side side) const {
    const int bits = static_cast<int>(options_.budget_bits.value_or(0.0)) * stats.geometry.dim(side);
    return (round_up((bits + 7) / 8, kRowWord) + scale_bytes(options_.side(side).scale_type)) *
           static_cast<double>(stats.geometry.num_kv_heads);
  }

  /// What was tried of one layer.
  struct LayerTrials {
    std::vector<BudgetUnit> units;
    double exact_bytes = 0.0;
    const char* metric = "";
    std::int64_t tokens = 0;
  };
  LayerTrials try_layer(std::size_t i) const {
    LayerTrials tried;
    const auto stats = source_.load(i);
    std::vector<Side> sides;
    for (const Side side : stats->has_values ? std::vector{Side::k, Side::v} : std::vector{Side::k})
      if (stays_exact(options_, stats->layer, side))
        tried.exact_bytes += kExactBytes * channels_of(*stats, side);
      else
        sides.push_back(side);
    if (sides.empty()) return tried;
    const bool behind_o_proj = measures_behind_o_proj(*stats, options_);
    const LayerJudge judge(*stats, behind_o_proj, options_.windows, context_.backend);
    tried.metric = judge.has_curvature() ? "nll" : behind_o_proj ? "relative_residual" : "relative_output";
    tried.tokens = stats->held_out->count();
    for (const Side side : sides) {
      BudgetUnit unit{
          .sized = {.layer = i, .side = side, .geometry = stats->geometry, .choices = {}, .formats = {}},
          .channels = channels_of(*stats, side),
          .scale_bytes =
              static_cast<double>(scale_bytes(options_.side(side).scale_type)) * stats->geometry.num_kv_heads,
          .whole_bytes = whole_bytes(*stats, side),
          .budgets = ladder(*stats, side),
          .bases = {},
          .changes = {},
          .bits = {},
          .bytes = {},
      };
      try_ladder(*stats, judge, unit);
      tried.units.push_back(std::move(unit));
    }
    return tried;
  }

  /// Total size that the budget allows, in the unit of Choice::size.
  double allowance() const {
    if (options_.budget_bits) return allowed_by_bits(channels_, scale_bytes_, whole_bytes_);
    return *options_.budget_bytes * static_cast<double>(source_.size()) - exact_bytes_;
  }

  /// Size that the budget in code bits allows to so many channels: with bytes, one scale a row comes on top. Codes of
  /// the budget's whole bits are allowed, although pages pad short rows to words.
  double allowed_by_bits(double channels, double scales, double whole) const {
    const double bits = *options_.budget_bits * channels;
    return weighs_bytes() ? std::max(bits / 8 + scales, whole) : bits;
  }

  /// Searches each layer alone: all layers spend the same, and a layer's keys and values share its budget.
  ChosenSizes search_each_layer(Target target) const {
    ChosenSizes all;
    for (std::size_t first = 0; first < units_.size();) {
      std::size_t end = first;
      double channels = 0.0, scales = 0.0, whole = 0.0;
      for (; end < units_.size() && sized_[end].layer == sized_[first].layer; ++end)
        channels += units_[end].channels, scales += units_[end].scale_bytes, whole += units_[end].whole_bytes;
      const double allowed = options_.budget_bits ? allowed_by_bits(channels, scales, whole)
                                                  : *options_.budget_bytes - exact_bytes_of_[sized_[first].layer];
      const ChosenSizes found =
          choose_sizes(std::span(sized_).subspan(first, end - first), allowed, {.target = target});
      all.chosen.insert(all.chosen.end(), found.chosen.begin(), found.chosen.end());
      all.cost += found.cost;
      all.bound += found.bound;
      all.target = std::max(all.target, found.target);
      first = end;
    }
    return all;
  }

  /// What was chosen of each unit.
  struct Selection {
    std::vector<std::size_t> chosen;
    double gap = 0.0;
    TargetResult target = TargetResult::unasked;
    double free_cost = 0.0;  ///< if the target was kept: cost of the best choice without it
  };
  Selection select(Target target) const {
    if (!joint()) return {.chosen = std::vector<std::size_t>(units_.size(), 0)};
    ChosenSizes found = options_.budget_per_layer
                            ? search_each_layer(target)
                            : choose_sizes(sized_, allowance(), {options_.uniform_layout, target});
    Selection selection{
        .chosen = std::move(found.chosen),
        .gap = found.bound > 0.0 ? std::max(0.0, found.cost / found.bound - 1.0) : 0.0,
        .target = found.target,
    };
    if (found.target == TargetResult::kept) selection.free_cost = cost_of(select(Target::free).chosen);
    return selection;
  }

  /// Sum over layers and sides in the unit of the report, without the weights of layers.
  double cost_of(const std::vector<std::size_t>& chosen) const {
    double cost = 0.0;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const OutputChange& change = units_[u].changes[chosen[u]];
      cost += metric_ == "nll" ? change.curved : change.squared;
    }
    return cost;
  }

  BudgetReport report(const Selection& selection) const {
    double bits = 0.0, bytes = exact_bytes_;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      bits += units_[u].bits[selection.chosen[u]];
      bytes += units_[u].bytes[selection.chosen[u]];
    }
    BudgetReport result{
        .unit = options_.budget_bytes ? "bytes" : "bits",
        .mean_bits = bits / channels_,
        .mean_bytes = bytes / static_cast<double>(source_.size()),
        .metric = metric_,
        .cost = cost_of(selection.chosen),
        .gap = selection.gap,
        .tokens = tokens_,
        .target = selection.target,
        .free_cost = selection.free_cost,
    };
    result.spent = options_.budget_bytes ? result.mean_bytes : result.mean_bits;
    result.budget = options_.budget_bits    ? *options_.budget_bits
                    : options_.budget_bytes ? *options_.budget_bytes
                                            : result.spent;
    return result;
  }

  /// Weighs layers against each other. The curvature gives a second-order forecast of the loss, which overrates some
  /// layers (the first layer of the sample model up to ninefold); the relative output error gives all layers the same
  /// weight. The weight of a layer and side is forecast over relative error. The exponent kTrust draws the weight
  /// towards the geometric mean of all weights: 1 takes the forecast, 0 the relative error. One half was the best of 0,
  /// 1/2 and 1 on the text that the sample model was calibrated on.
  void weigh_layers() {
    constexpr double kTrust = 0.5;
    std::vector<double> logs;
    for (const BudgetUnit& unit : units_) {
      const OutputChange& middle = unit.changes[unit.changes.size() / 2];
      logs.push_back(std::log(std::max(middle.curved, 1e-300) / std::max(middle.squared, 1e-300)));
    }
    const double mean = std::accumulate(logs.begin(), logs.end(), 0.0) / static_cast<double>(logs.size());
    for (std::size_t u = 0; u < units_.size(); ++u)
      for (Choice& choice : sized_[u].choices) choice.cost *= std::exp((kTrust - 1.0) * (logs[u] - mean));
  }

  LayerPlan build_layer(std::size_t i, const std::vector<std::size_t>& chosen) const {
    const auto stats = source_.load(i);
    LayerPlan plan{.layer = stats->layer, .geometry = stats->geometry, .k = exact_plan(options_), .v = {}};
    if (stats->has_values) plan.v = exact_plan(options_);
    for (std::size_t u = 0; u < units_.size(); ++u) {
      if (sized_[u].layer != i) continue;
      Views views(*stats, options_, sized_[u].side, context_.backend);
      const Bases& bases = units_[u].bases[chosen[u]];
      TensorPlan side = views.of(bases).plan(units_[u].budgets[chosen[u]], allocations(bases), true);
      (sized_[u].side == Side::k ? plan.k : *plan.v) = std::move(side);
    }
    validate(plan);
    return plan;
  }
  std::vector<LayerPlan> build(const std::vector<std::size_t>& chosen) const {
    std::vector<LayerPlan> plans;
    for_each_layer(
        context_.backend, source_.size(), [&](std::size_t i) { return build_layer(i, chosen); },
        [&](std::size_t, LayerPlan plan) { plans.push_back(std::move(plan)); });
    return plans;
  }

  const StatsSource& source_;
  const Options& options_;
  const MethodContext& context_;
  std::vector<BudgetUnit> units_;
  std::vector<SizedSide> sized_;        ///< of each unit
  std::string metric_;                  ///< see BudgetReport
  std::int64_t tokens_ = 0;             ///< held out
  double channels_ = 0.0;               ///< of all quantized sides, per token
  double scale_bytes_ = 0.0;            ///< of one scale for each row, of all quantized sides, per token
  double whole_bytes_ = 0.0;            ///< BudgetUnit::whole_bytes, of all quantized sides
  double exact_bytes_ = 0.0;            ///< of all exact sides, per token
  std::vector<double> exact_bytes_of_;  ///< the same for each layer
};

}  // namespace

Decision decide_with_budget(const StatsSource& source, const Options& options, const MethodContext& context) {
  return std::move(decide_targets(source, options, std::span(&options.target, 1), context).front());
}

std::vector<Decision> decide_targets(const StatsSource& source, const Options& options, std::span<const Target> targets,
                                     const MethodContext& context) {
  Planner planner(source, options, context);
  planner.try_everything();
  std::vector<Decision> decisions;
  for (const Target target : targets) decisions.push_back(planner.decide(target));
  return decisions;
}

}  // namespace kvq
