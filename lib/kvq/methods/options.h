#pragma once

#include <kvq/container/json.h>
#include <kvq/plan/layer_plan.h>
#include <kvq/stats/layer_stats.h>

#include <optional>
#include <string>
#include <vector>

namespace kvq {

/// What a user may say of one side, keys or values. Axes are independent: every method takes all of them.
struct SideOptions {
  int bits = 2;                 ///< 1..8, 16 = exact
  int group_size = 0;           ///< 0: the method's default, see resolve_group_size()
  UniformLevels levels = UniformLevels::affine;
  ScaleRule rule = ScaleRule::minmax;
  ZeroKind zero = ZeroKind::floating;
  ScaleType scale_type = ScaleType::fp16;
  bool center = false;
  std::optional<double> clip = 1.0;   ///< 1 = no clip, nullopt = search on the sample
  Moment target = Moment::query;      ///< OSCAR: moment whose eigenbasis U is
  bool hadamard = true;               ///< SAW-INT4: rotate this side
};

struct Options {
  std::string method = "oscar";
  SideOptions k, v;
  Windows windows;
  Scope scope = Scope::kv_head;
  std::uint64_t seed = 0;
  std::vector<int> exact_layers;
  std::string composition = "uhp";  ///< OSCAR
  int sign_search = 0;              ///< OSCAR: random sign choices tried beside the canonical one
  int hadamard_order = 0;           ///< SAW-INT4: 0 = the largest power of two, at most 128, that divides head_dim
  bool random_signs = false;        ///< SAW-INT4, quarot: random signs before the Hadamard
  const SideOptions& side(char which) const { return which == 'k' ? k : v; }
};

/// Group size of a side: the one asked for, else `preferred` if it divides dim, else dim.
/// @throws Error{usage} naming the divisors if the one asked for does not divide dim
int resolve_group_size(int asked, int preferred, int dim, int layer, char side);

/// Contradictions that no single flag shows (clip with a rule that has no range, rule and coder).
/// @throws Error{usage}
void check_options(const Options& options);

/// For the manifest: every option that decides, defaults included.
Json options_to_json(const Options& options);

}  // namespace kvq
