#pragma once

#include <kvq/plan/kernel_rows.h>
#include <kvq/plan/layer_pages.h>

#include <array>
#include <span>
#include <string>
#include <vector>

namespace kvq {

/// The kernel that the runtime takes for a verb: a tuned one (a row of variants.json), a generic one, or none.
enum class KernelKind : std::uint8_t { none, generic, tuned };
const char* to_string(KernelKind kind);

/// 16-bit type of queries, new rows and results.
enum class Activation : std::uint8_t { bf16, fp16 };
inline constexpr std::array kActivations = {Activation::bf16, Activation::fp16};
const char* to_string(Activation activation);

/// Whether and how the runtime serves a layer. `libkvq_runtime` decides the same when it loads an artifact.
struct ServedBy {
  std::vector<PageFault> refused = {};  ///< why pages do not hold the layer; empty: pages hold it
  std::string no_kernel = {};  ///< why no kernel takes the layer although pages hold it; empty: kernels take it
  std::array<KernelKind, kKernelVerbs.size()> kernels = {};  ///< by index(KernelVerb); of a served layer prefill may
                                                             ///< have none

  KernelKind by(KernelVerb verb) const { return kernels[index(verb)]; }
  bool is_served() const { return refused.empty() && no_kernel.empty(); }
  bool operator==(const ServedBy&) const = default;
};

/// How tuned kernels dequantize the rows in one side's bit tiles. A layer has these kernels if neither side is `none`.
/// The names of formats do not tell, because they say only sizes.
enum class TunedRows : std::uint8_t {
  none,    ///< they do not, or the side has no bit tiles
  linear,  ///< they multiply a matrix by the bits of linear rows (linear_rows.h)
  coded,   ///< they decode codebook or symmetric codes of any widths, then undo the rotation
};
/// @param plan  of one side, valid  @param tiles  tile_side() of it
TunedRows tuned_rows(const TensorPlan& plan, const TileSide& tiles, int num_kv_heads);

/// What tuned kernels ask of one side's rows.
struct SideFormat {
  std::string name;      ///< side_name()
  bool readable = true;  ///< no bit tiles, or all rows in them are linear, of table_bits or `segments`
  bool operator==(const SideFormat&) const = default;
};
/// @param plan  of one side, valid, and pages hold it
SideFormat side_format(const TensorPlan& plan, int num_kv_heads, int dim);

/// Whether a tuned kernel decodes layers of this shape with such keys and values.
bool has_tuned_decode(const LayerGeometry& geometry, const SideFormat& k, const SideFormat& v, Activation activation,
                      std::span<const KernelRow> tuned = kernel_rows());

/// @param plan   valid
/// @param tuned  the tuned kernels that the runtime has
ServedBy served_by(const LayerPlan& plan, Activation activation, std::span<const KernelRow> tuned = kernel_rows());

/// Format of a layer as the rows of variants.json name it: "u2g128", or "u4g128/u2g128" where keys and values differ.
/// @param plan  pages hold it
std::string cache_format_name(const LayerPlan& plan);

}  // namespace kvq
