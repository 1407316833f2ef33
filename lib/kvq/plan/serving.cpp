#include <kvq/plan/kernel_limits.h>
#include <kvq/plan/linear_rows.h>
#include <kvq/plan/serving.h>
#include <kvq/plan/table_rows.h>

#include <fmt/core.h>

#include <algorithm>
#include <utility>
#include <variant>

namespace kvq {

namespace {

/// What rows of variants.json are compared with.
struct LayerFormat {
  SideFormat k, v;
  int k_dim = 0, v_dim = 0, heads = 0;  ///< heads: query heads of a KV head
  Activation activation = Activation::bf16;
  bool dequantizes_bits = false;  ///< bit tiles that the tuned dequantize takes, without a row of variants.json
  bool writes_codebooks = false;  ///< likewise rows of one group of codebook codes and the tuned write
};

LayerFormat format_of(const LayerGeometry& geometry, SideFormat k, SideFormat v, Activation activation) {
  return {
      .k = std::move(k),
      .v = std::move(v),
      .k_dim = geometry.head_dim,
      .v_dim = geometry.v_head_dim,
      .heads = geometry.queries_per_kv_head(),
      .activation = activation,
  };
}

SideFormat format_of(const TensorPlan& plan, const TileSide& tiles, int num_kv_heads) {
  return {side_name(tiles, has_bfloat_scales(plan)), !tiles.is_bits() || tiles.table_bits > 0 || tiles.segments ||
                                                         has_linear_rows(plan, num_kv_heads, tiles.head_dim)};
}

LayerFormat format_of(const LayerPlan& plan, Activation activation) {
  const PageLayout pages = page_layout_of(plan, kTileTokens);
  const LayerGeometry& g = plan.geometry;
  LayerFormat format =
      format_of(g, format_of(plan.k, pages.k, g.num_kv_heads), format_of(*plan.v, pages.v, g.num_kv_heads), activation);
  format.dequantizes_bits = tuned_rows(plan.k, pages.k, g.num_kv_heads) != TunedRows::none &&
                            tuned_rows(*plan.v, pages.v, g.num_kv_heads) != TunedRows::none;
  format.writes_codebooks =
      codebook_row_bits(plan.k, g.head_dim, Side::k) > 0 && codebook_row_bits(*plan.v, g.v_head_dim, Side::v) > 0;
  return format;
}

bool fits(const KernelRow& row, const LayerFormat& format) {
  const auto is = [](std::string_view wanted, std::string_view found) { return wanted.empty() || wanted == found; };
  const bool can_read = row.verb != KernelVerb::decode || (format.k.readable && format.v.readable);
  return can_read && row.head_dim == format.k_dim && row.head_dim == format.v_dim && is(row.k, format.k.name) &&
         is(row.v, format.v.name) && is(row.activation, to_string(format.activation));
}

KernelKind kernel_of(KernelVerb verb, const LayerFormat& format, std::span<const KernelRow> tuned) {
  if (verb == KernelVerb::prefill && format.heads > kMostPrefillHeads) return KernelKind::none;
  if (verb == KernelVerb::dequantize && format.dequantizes_bits) return KernelKind::tuned;
  if (verb == KernelVerb::quantize_write && format.writes_codebooks) return KernelKind::tuned;
  for (const KernelRow& row : tuned)
    if (row.verb == verb && fits(row, format)) return KernelKind::tuned;
  return is_generic_head_dim(format.k_dim) && is_generic_head_dim(format.v_dim) ? KernelKind::generic
                                                                                : KernelKind::none;
}

/// A dense map of a side is stored in slabs of 32 rows.
bool maps_fit(const LayerPlan& plan) {
  const auto fits_slabs = [](const TensorPlan& side, int dim) {
    return side.rotation.kind != RotationKind::dense || dim % 32 == 0;
  };
  return fits_slabs(plan.k, plan.geometry.head_dim) && fits_slabs(*plan.v, plan.geometry.v_head_dim);
}

}  // namespace

const char* to_string(KernelVerb verb) {
  constexpr std::array names = {"decode", "quantize_write", "dequantize", "prefill"};
  static_assert(names.size() == kKernelVerbs.size());
  return names[index(verb)];
}

const char* to_string(KernelKind kind) {
  switch (kind) {
    case KernelKind::none: return "none";
    case KernelKind::generic: return "generic";
    case KernelKind::tuned: return "tuned";
  }
  return "";
}

const char* to_string(Activation activation) { return activation == Activation::bf16 ? "bf16" : "fp16"; }

TunedRows tuned_rows(const TensorPlan& plan, const TileSide& tiles, int num_kv_heads) {
  if (dequantizes_linear(tiles) && has_linear_rows(plan, num_kv_heads, tiles.head_dim)) return TunedRows::linear;
  const auto* uniform = std::get_if<UniformCoder>(&plan.coder);
  const bool decodes =
      std::holds_alternative<CodebookCoder>(plan.coder) || (uniform && uniform->levels == UniformLevels::symmetric);
  return decodes && dequantizes_coded(tiles) ? TunedRows::coded : TunedRows::none;
}

SideFormat side_format(const TensorPlan& plan, int num_kv_heads, int dim) {
  return format_of(plan, tile_side(plan, dim), num_kv_heads);
}

bool has_tuned_decode(const LayerGeometry& geometry, const SideFormat& k, const SideFormat& v, Activation activation,
                      std::span<const KernelRow> tuned) {
  return kernel_of(KernelVerb::decode, format_of(geometry, k, v, activation), tuned) == KernelKind::tuned;
}

ServedBy served_by(const LayerPlan& plan, Activation activation, std::span<const KernelRow> tuned) {
  ServedBy served{.refused = page_faults(plan)};
  if (!served.refused.empty()) return served;
  const LayerFormat format = format_of(plan, activation);
  if (!maps_fit(plan)) {
    served.no_kernel = "head_dim of a dense rotation: supported multiples of 32, found another";
    return served;
  }
  for (const KernelVerb verb : kKernelVerbs) served.kernels[index(verb)] = kernel_of(verb, format, tuned);
  if (served.by(KernelVerb::decode) == KernelKind::none)
    served.no_kernel = fmt::format("head_dim: supported multiples of 8 up to {}, found {}", kGenericHeadDim,
                                   is_generic_head_dim(format.k_dim) ? format.v_dim : format.k_dim);
  return served;
}

std::string cache_format_name(const LayerPlan& plan) {
  const LayerFormat format = format_of(plan, Activation::bf16);
  return format.k.name == format.v.name ? format.k.name : format.k.name + "/" + format.v.name;
}

}  // namespace kvq
