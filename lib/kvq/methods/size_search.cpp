#include <kvq/core/error.h>
#include <kvq/methods/size_search.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>

namespace kvq {

namespace {

/// Sides whose sizes are chosen together: one unit of the search.
struct Bundle {
  std::vector<std::size_t> members;             ///< indices of sides
  std::vector<Choice> choices;                  ///< sums over the members
  std::vector<std::vector<std::size_t>> picks;  ///< per choice: the choice of each member
};

using SizedSides = std::span<const SizedSide>;

Bundle alone(SizedSides sides, std::size_t side) {
  Bundle bundle{{side}, sides[side].choices, {}};
  for (std::size_t i = 0; i < bundle.choices.size(); ++i) bundle.picks.push_back({i});
  return bundle;
}

/// One side of all layers that have it, each with the same choice.
Bundle alike(SizedSides sides, Side which) {
  Bundle bundle;
  for (std::size_t s = 0; s < sides.size(); ++s) {
    if (sides[s].side != which) continue;
    const std::vector<Choice>& own = sides[s].choices;
    if (bundle.members.empty()) bundle.choices.resize(own.size());
    if (bundle.choices.size() != own.size())
      throw Error{ErrorKind::unsupported, "--uniform-layout: the layers have different head dimensions",
                  "leave the flag out: each layer then has rows of its own"};
    bundle.members.push_back(s);
    for (std::size_t i = 0; i < own.size(); ++i) {
      bundle.choices[i].size += own[i].size;
      bundle.choices[i].cost += own[i].cost;
    }
  }
  for (std::size_t i = 0; i < bundle.choices.size(); ++i) bundle.picks.emplace_back(bundle.members.size(), i);
  return bundle;
}

/// Drops choices that cost no less than a smaller one.
void keep_useful(Bundle& bundle) {
  std::vector<std::size_t> order(bundle.choices.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const Choice &x = bundle.choices[a], &y = bundle.choices[b];
    return std::tuple(x.size, x.cost, a) < std::tuple(y.size, y.cost, b);
  });
  Bundle useful{bundle.members, {}, {}};
  for (const std::size_t i : order) {
    if (!useful.choices.empty() && bundle.choices[i].cost >= useful.choices.back().cost) continue;
    useful.choices.push_back(bundle.choices[i]);
    useful.picks.push_back(std::move(bundle.picks[i]));
  }
  bundle = std::move(useful);
}

double smallest(const Bundle& bundle) { return std::ranges::min_element(bundle.choices, {}, &Choice::size)->size; }
double largest(const Bundle& bundle) { return std::ranges::max_element(bundle.choices, {}, &Choice::size)->size; }

double sum(const std::vector<Bundle>& bundles, double (*of)(const Bundle&)) {
  double total = 0.0;
  for (const Bundle& bundle : bundles) total += of(bundle);
  return total;
}

class Search {
 public:
  Search(SizedSides sides, double budget, const SizeRules& rules, std::span<const KernelRow> tuned)
      : sides_(sides), budget_(budget), rules_(rules), tuned_(tuned) {}

  ChosenSizes run() const {
    const std::vector<Bundle> free = free_bundles();
    if (rules_.target == Target::free) return search(free, TargetResult::unasked);
    std::vector<Bundle> bundles = tuned_bundles();
    const TargetResult result = can_keep(free, bundles);
    if (result != TargetResult::kept) return search(free, result);
    for (Bundle& bundle : bundles)
      if (bundle.members.size() > 1) keep_useful(bundle);
    return search(bundles, result);
  }

 private:
  std::vector<Bundle> free_bundles() const {
    std::vector<Bundle> bundles;
    if (rules_.uniform)
      for (const Side side : kSides) bundles.push_back(alike(sides_, side));
    else
      for (std::size_t s = 0; s < sides_.size(); ++s) bundles.push_back(alone(sides_, s));
    std::erase_if(bundles, [](const Bundle& bundle) { return bundle.members.empty(); });
    return bundles;
  }

  /// Keys and values of a layer, or of all layers alike, in one bundle of the pairs that tuned kernels decode. Empty if
  /// there is no such pair at all.
  std::vector<Bundle> tuned_bundles() const {
    std::vector<Bundle> bundles;
    bool restricted = false;
    const auto add = [&](Bundle k, Bundle v) {
      if (std::optional<Bundle> pair = paired(k, v)) {
        bundles.push_back(*std::move(pair));
        restricted = true;
      } else {
        for (Bundle* bundle : {&k, &v})
          if (!bundle->members.empty()) bundles.push_back(std::move(*bundle));
      }
    };
    if (rules_.uniform)
      add(alike(sides_, Side::k), alike(sides_, Side::v));
    else
      for (std::size_t s = 0; s < sides_.size(); ++s) {
        const bool has_values = sides_[s].side == Side::k && s + 1 < sides_.size() && sides_[s + 1].side == Side::v &&
                                sides_[s + 1].layer == sides_[s].layer;
        add(alone(sides_, s), has_values ? alone(sides_, s + 1) : Bundle{});
        if (has_values) ++s;
      }
    return restricted ? bundles : std::vector<Bundle>{};
  }

  std::optional<Bundle> paired(const Bundle& k, const Bundle& v) const {
    Bundle pair{k.members, {}, {}};
    pair.members.insert(pair.members.end(), v.members.begin(), v.members.end());
    for (std::size_t i = 0; i < k.choices.size(); ++i)
      for (std::size_t j = 0; j < v.choices.size(); ++j) {
        if (!is_tuned(k, k.picks[i], v, v.picks[j])) continue;
        pair.choices.push_back({k.choices[i].size + v.choices[j].size, k.choices[i].cost + v.choices[j].cost});
        pair.picks.push_back(k.picks[i]);
        pair.picks.back().insert(pair.picks.back().end(), v.picks[j].begin(), v.picks[j].end());
      }
    return pair.choices.empty() ? std::nullopt : std::optional(std::move(pair));
  }

  /// Whether a tuned kernel decodes each layer that has both sides.
  bool is_tuned(const Bundle& k, const std::vector<std::size_t>& k_picks, const Bundle& v,
                const std::vector<std::size_t>& v_picks) const {
    bool any = false;
    for (std::size_t a = 0; a < k.members.size(); ++a)
      for (std::size_t b = 0; b < v.members.size(); ++b) {
        const SizedSide &keys = sides_[k.members[a]], &values = sides_[v.members[b]];
        if (keys.layer != values.layer) continue;
        if (keys.formats.empty() || values.formats.empty() ||
            !has_tuned_decode(keys.geometry, keys.formats[k_picks[a]], values.formats[v_picks[b]], Activation::bf16,
                              tuned_))
          return false;
        any = true;
      }
    return any;
  }

  TargetResult can_keep(const std::vector<Bundle>& free, const std::vector<Bundle>& bundles) const {
    if (bundles.empty()) return TargetResult::no_kernels;
    const double slack = 1e-9 * std::max(1.0, budget_);
    if (sum(bundles, smallest) > budget_ + slack) return TargetResult::budget_too_low;
    if (sum(bundles, largest) < std::min(budget_, sum(free, largest)) - slack) return TargetResult::budget_too_high;
    return TargetResult::kept;
  }

  ChosenSizes search(const std::vector<Bundle>& bundles, TargetResult target) const {
    std::vector<std::vector<Choice>> units;
    units.reserve(bundles.size());
    for (const Bundle& bundle : bundles) units.push_back(bundle.choices);
    const BudgetResult found = search_budget(units, budget_);
    ChosenSizes sizes{std::vector<std::size_t>(sides_.size(), 0), found.cost, found.bound, target};
    for (std::size_t b = 0; b < bundles.size(); ++b)
      for (std::size_t m = 0; m < bundles[b].members.size(); ++m)
        sizes.chosen[bundles[b].members[m]] = bundles[b].picks[found.chosen[b]][m];
    return sizes;
  }

  SizedSides sides_;
  double budget_;
  SizeRules rules_;
  std::span<const KernelRow> tuned_;
};

}  // namespace

const char* to_string(TargetResult result) {
  switch (result) {
    case TargetResult::unasked: return "unasked";
    case TargetResult::no_kernels: return "no_kernels";
    case TargetResult::kept: return "kept";
    case TargetResult::budget_too_low: return "budget_too_low";
    case TargetResult::budget_too_high: return "budget_too_high";
  }
  return "?";
}

ChosenSizes choose_sizes(std::span<const SizedSide> sides, double budget, const SizeRules& rules,
                         std::span<const KernelRow> tuned) {
  return Search(sides, budget, rules, tuned).run();
}

}  // namespace kvq
