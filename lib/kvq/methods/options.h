#pragma once

#include <kvq/container/json.h>
#include <kvq/plan/layer_plan.h>
#include <kvq/solve/metric_transform.h>
#include <kvq/solve/spectral.h>
#include <kvq/stats/layer_stats.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace kvq {

/// What widths are given to: all channels alike, RoPE blocks of keys, or channels of a rotated basis.
enum class Allocate { none, rope_block, channel };

/// How a RoPE block is scored, from the mean squared lengths of its queries and keys (Block-GTQ Eq. 4 and C.2; the last
/// score is an addition of kvq): qk_avg 1/2 (Eq + Ek), qk_max, qk_product sqrt(Eq Ek), k_only, q_only,
/// qk_energy_product Eq Ek: the squared logit error that a relative quantization error of the block causes.
enum class BlockScore { qk_avg, qk_max, qk_product, k_only, q_only, qk_energy_product };

/// What shares a stored scale in rows of mixed widths: a segment, or the whole row (packing.md, "One scale a row").
enum class ScaleScope { segment, row };

/// Which sizes of rows a budget chooses among: those that tuned kernels decode, or all (size_search.h).
enum class Target { runtime, free };

/// What a joint budget in code bits counts: code bits alone, or bytes in pages, which have scales and whole words.
enum class Weigh { bits, bytes };

/// Rotation inside a group of channels of one width.
enum class Mixing { haar, hadamard };

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

/// A value as a user types it.
using OptionValue = std::variant<bool, std::int64_t, double, std::string>;

struct Options {
  std::string method = "oscar";
  SideOptions k, v;
  Windows windows;
  Scope scope = Scope::kv_head;
  std::uint64_t seed = 0;
  std::vector<int> exact_layers;
  CompositionId composition = CompositionId::uhp;  ///< OSCAR
  int sign_search = 0;                             ///< OSCAR: random sign choices tried beside the canonical one
  int hadamard_order = 0;     ///< SAW-INT4: 0 = the largest power of two, at most 128, that divides head_dim
  bool random_signs = false;  ///< SAW-INT4, quarot: random signs before the Hadamard
  bool kmeans_joint = false;  ///< one centroid for all heads of a token
  bool kmeans_after = false;  ///< cluster after the rotation
  int kmeans_restarts = 1;
  BlockScore score = BlockScore::qk_avg;  ///< Block-GTQ
  int min_bits = 1, max_bits = 8;         ///< allocation
  bool coder_law = false;                 ///< allocation: by the coder's own distortions, not by 4^-b
  Mixing mixing = Mixing::haar;
  ScaleScope scales = ScaleScope::segment;  ///< of rows of mixed widths
  int memory = 3;                           ///< trellis: largest memory
  std::optional<double> budget_bits;        ///< joint: average code bits over layers and sides
  std::optional<double> budget_bytes;       ///< joint: bytes a token and layer, average over layers
  Weigh weigh = Weigh::bits;                ///< joint: what budget_bits counts
  Target target = Target::runtime;          ///< joint: which sizes are chosen among
  bool uniform_layout = false;              ///< joint: equal rows in all layers
  bool budget_per_layer = false;            ///< joint: every layer spends the same, on keys and values together
  bool choose_basis = false;                ///< joint: also try the whole head rotated, head by head
  bool choose_transform = false;            ///< joint: also try klt, head by head
  /// Values of options that one method's file declares, by their names in the manifest, see OwnOption.
  std::map<std::string, OptionValue, std::less<>> own;
  const SideOptions& side(Side which) const { return which == Side::k ? k : v; }
  SideOptions& side(Side which) { return which == Side::k ? k : v; }
};

/// Widths and clip ratios that one side can have.
bool is_bit_width(double bits);
bool is_clip_ratio(double ratio);

/// Group size of a side: `asked` if not 0, else `preferred` if it divides dim, else dim.
/// @throws Error{usage} naming the divisors if `asked` does not divide dim
int resolve_group_size(int asked, int preferred, int dim, int layer, Side side);

/// The flag that an error about one side names, such as "--bits" or "--bits-k": the one that the user typed.
using SideFlag = std::function<std::string(const char* flag, Side side)>;
/// The side's own flag: "--bits-k".
std::string own_side_flag(const char* flag, Side side);

/// Refuses options that contradict each other, whatever the method.
/// @param flag_of  names the flags in errors
/// @throws Error{usage}
void check_contradictions(const Options& options, const SideFlag& flag_of = own_side_flag);

const char* to_string(Allocate allocate);
const char* to_string(BlockScore score);
const char* to_string(Mixing mixing);
const char* to_string(ScaleScope scope);
const char* to_string(Weigh weigh);
const char* to_string(Target target);
const char* to_string(CompositionId composition);

}  // namespace kvq
