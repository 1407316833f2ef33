#include <kvq/plan/kernel_limits.h>
#include <kvq/plan/linear_rows.h>
#include <kvq/plan/serving.h>

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace kvq {

namespace {

/// What rows of variants.json are compared with.
struct LayerFormat {
  std::string k, v;
  int k_dim = 0, v_dim = 0, heads = 0;  ///< heads: query heads of a KV head
  Activation activation = Activation::bf16;
  bool in_bits = false, linear = false;  ///< a side has bit tiles; tuned kernels take those of linear rows
  bool dequantizes_linear = false;       ///< linear rows that the tuned dequantize takes, without a row of its own
};

LayerFormat format_of(const LayerPlan& plan, Activation activation) {
  const PageLayout pages = page_layout_of(plan, kTileTokens);
  const bool linear = has_linear_bit_tiles(plan, pages);
  return {
      .k = side_name(pages.k, has_bfloat_scales(plan.k)),
      .v = side_name(pages.v, has_bfloat_scales(*plan.v)),
      .k_dim = plan.geometry.head_dim,
      .v_dim = plan.geometry.v_head_dim,
      .heads = plan.geometry.queries_per_kv_head(),
      .activation = activation,
      .in_bits = pages.k.is_bits() || pages.v.is_bits(),
      .linear = linear,
      .dequantizes_linear = linear && dequantizes_linear(pages.k, pages.v),
  };
}

bool fits(const KernelRow& row, const LayerFormat& format) {
  const auto is = [](std::string_view wanted, std::string_view found) { return wanted.empty() || wanted == found; };
  const bool can_read = row.verb != KernelVerb::decode || !format.in_bits || format.linear;
  return can_read && row.head_dim == format.k_dim && row.head_dim == format.v_dim && is(row.k, format.k) &&
         is(row.v, format.v) && (row.heads == 0 || format.heads <= row.heads) &&
         is(row.activation, to_string(format.activation));
}

KernelKind kernel_of(KernelVerb verb, const LayerFormat& format, std::span<const KernelRow> tuned) {
  if (verb == KernelVerb::prefill && format.heads > kMostPrefillHeads) return KernelKind::none;
  if (verb == KernelVerb::dequantize && format.dequantizes_linear) return KernelKind::tuned;
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

bool has_linear_bit_tiles(const LayerPlan& plan, const PageLayout& pages) {
  const LayerGeometry& g = plan.geometry;
  return (pages.k.is_bits() || pages.v.is_bits()) &&
         (!pages.k.is_bits() || has_linear_rows(plan.k, g.num_kv_heads, g.head_dim)) &&
         (!pages.v.is_bits() || has_linear_rows(*plan.v, g.num_kv_heads, g.v_head_dim));
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
  return format.k == format.v ? format.k : format.k + "/" + format.v;
}

}  // namespace kvq
