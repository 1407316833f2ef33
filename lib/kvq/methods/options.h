#pragma once

#include <kvq/container/json.h>
#include <kvq/plan/layer_plan.h>
#include <kvq/solve/metric_transform.h>
#include <kvq/stats/layer_stats.h>

#include <optional>
#include <string>
#include <vector>

namespace kvq {

/// What widths are given to: all channels alike, RoPE blocks of keys, or channels of a rotated basis.
enum class Allocate { none, rope_block, channel };

/// A user's options for one side, keys or values. The options are independent: every method takes all of them.
struct SideOptions {
  double bits = 2;     ///< 1..8, 16 = exact; fractions only with allocated widths
  int row_bytes = 0;   ///< allocate widths that fill rows of this size; 0 = by `bits`
  int group_size = 0;  ///< 0: the method's default, see resolve_group_size()
  CoderKind coder = CoderKind::affine;
  bool fitted = false;  ///< codebook: Lloyd on the sample instead of the sphere's marginal
  Allocate allocate = Allocate::none;
  int kmeans = 0;  ///< centroids of the residual code; 0 = none
  ScaleRule rule = ScaleRule::minmax;
  ZeroKind zero = ZeroKind::floating;
  ScaleType scale_type = ScaleType::fp16;
  bool center = false;
  TransformKind transform =
      TransformKind::orthogonal;     ///< coordinates that are rotated and quantized; klt also needs Allocate::channel
  std::optional<double> clip = 1.0;  ///< 1 = no clip, nullopt = search on the sample
  Moment target = Moment::query;     ///< OSCAR: moment whose eigenbasis U is
  bool hadamard = true;              ///< SAW-INT4: rotate this side
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
  std::string hessian = "none";     ///< SAW-INT4: none, paper or consistent (A.3)
  bool kmeans_joint = false;        ///< one centroid for all heads of a token
  bool kmeans_after = false;        ///< cluster after the rotation
  int kmeans_restarts = 1;
  std::string score = "qk_avg";        ///< Block-GTQ: how a RoPE block is scored, see score_names()
  int min_bits = 1, max_bits = 8;      ///< allocation
  bool coder_law = false;              ///< allocation: by the coder's own distortions, not by 4^-b
  std::string mixing = "haar";         ///< rotation inside a group of one width: haar or hadamard
  int memory = 3;                      ///< trellis: largest memory
  std::optional<double> budget_bits;   ///< joint: average code bits over layers and sides
  std::optional<double> budget_bytes;  ///< joint: bytes a token and layer, average over layers
  bool uniform_layout = false;         ///< joint: equal rows in all layers
  bool budget_per_layer = false;       ///< joint: every layer spends the same, on keys and values together
  bool choose_basis = false;           ///< joint: also try the whole head rotated, head by head
  bool choose_transform = false;       ///< joint: also try klt, head by head
  const SideOptions& side(Side which) const { return which == Side::k ? k : v; }
};

/// Group size of a side: `asked` if not 0, else `preferred` if it divides dim, else dim.
/// @throws Error{usage} naming the divisors if `asked` does not divide dim
int resolve_group_size(int asked, int preferred, int dim, int layer, Side side);

/// Refuses contradictory options (clip with a scale rule without a range, scale rule and coder).
/// @throws Error{usage}
void check_options(const Options& options);

const char* to_string(Allocate allocate);

/// For the manifest: every option that decides, defaults included.
Json options_to_json(const Options& options);

}  // namespace kvq
