#include <kvq/plan/layer_pages.h>

#include <kvq/core/error.h>

#include <fmt/ranges.h>

#include <numeric>
#include <string>
#include <vector>

namespace kvq {

namespace {

/// Collects everything in one side's plan that pages do not support.
struct SideCheck {
  Side side;
  std::vector<PageFault>& faults;

  template <typename Found>
  void fail(const char* what, const std::string& supported, const Found& found) const {
    faults.push_back({side, what, supported, fmt::format("{}", found)});
  }

  void check(const TensorPlan& plan, int dim) const {
    if (plan.centroids) fail("centroids", "none", plan.centroids->count);
    if (plan.allocation) fail("widths of channels", "one for all", "mixed widths");
    std::visit(CheckCoder{*this, plan.allocation.has_value(), dim}, plan.coder);
  }

  struct CheckCoder {
    const SideCheck& side;
    bool mixed;
    int dim;

    void operator()(const ExactCoder&) const {
      if (dim % 16 != 0) side.fail("head_dim of exact rows", "multiples of 16", dim);
    }
    void operator()(const UniformCoder& coder) const {
      if (mixed) return;  // mixed rows have no single width and no group size
      if (coder.bits < 2 || coder.bits > 4)
        side.fail("bits", "2, 3, 4 and 16 (exact)", coder.bits);
      else if (dim * coder.bits % 128 != 0)  // a lane's codes are whole words
        side.fail("head_dim", fmt::format("multiples of {} with {} bits", 128 / std::gcd(128, coder.bits), coder.bits),
                  dim);
      if (coder.group_size % 32 != 0) side.fail("group_size", "multiples of 32", coder.group_size);
    }
    void operator()(const CodebookCoder& coder) const { refuse(coder); }
    void operator()(const TrellisCoder& coder) const { refuse(coder); }

    void refuse(const Coder& coder) const { side.fail("coder", "affine, symmetric, exact", coder_name(coder)); }
  };
};

bool has_integer_zero(const Coder& coder) {
  const auto* uniform = std::get_if<UniformCoder>(&coder);
  return uniform && uniform->levels == UniformLevels::affine && uniform->zero == ZeroKind::integer;
}

TileSide tile_side(const TensorPlan& plan, int dim) {
  // Exact rows have no groups, but code divides by group_size: it is head_dim, as in WindowLayout's defaults.
  if (is_exact(plan.coder)) return {dim, 16, dim, 0};
  return {
      .head_dim = dim,
      .bits = code_bits(plan.coder),
      .group_size = group_size(plan.coder),
      .numbers = numbers_per_group(plan.coder),
      .number_size = scale_bytes(scale_type(plan.coder)),
      .integer_zero = has_integer_zero(plan.coder),
  };
}

}  // namespace

std::string PageFault::text() const { return fmt::format("{}: supported {}, found {}", what, supported, found); }

std::vector<PageFault> page_faults(const LayerPlan& plan) {
  std::vector<PageFault> faults;
  SideCheck{Side::k, faults}.check(plan.k, plan.geometry.head_dim);
  const SideCheck values{Side::v, faults};
  if (plan.v)
    values.check(*plan.v, plan.geometry.v_head_dim);
  else
    values.fail("values", "layers that have them", "none");
  return faults;
}

bool is_page_size(int tokens) { return tokens == 16 || tokens == 32 || tokens == 64 || tokens == 128; }

PageLayout page_layout_of(const LayerPlan& plan, int page_size) {
  std::vector<std::string> faults;
  if (!is_page_size(page_size))
    faults.push_back(fmt::format("layer {}: page_size: supported 16, 32, 64, 128, found {}", plan.layer, page_size));
  for (const PageFault& fault : page_faults(plan))
    faults.push_back(fmt::format("layer {} {}: {}", plan.layer, name(fault.side), fault.text()));
  if (!faults.empty() || !plan.v)
    throw Error{ErrorKind::unsupported, fmt::format("pages: {}", fmt::join(faults, "; "))};
  return {tile_side(plan.k, plan.geometry.head_dim), tile_side(*plan.v, plan.geometry.v_head_dim),
          plan.geometry.num_kv_heads, page_size};
}

bool has_bfloat_scales(const TensorPlan& plan) {
  return !is_exact(plan.coder) && scale_type(plan.coder) == ScaleType::bf16;
}

ScaleType number_type_of(const TileSide& side, bool bfloat) {
  return side.number_size == 4 ? ScaleType::fp32 : bfloat ? ScaleType::bf16 : ScaleType::fp16;
}

std::string side_name(const TileSide& side, bool bfloat) {
  if (side.exact()) return "bf16";
  const char* type = side.number_size == 4 ? "f" : bfloat ? "b" : "";
  return fmt::format("{}{}g{}{}{}", side.numbers == 2 ? 'u' : 's', side.bits, side.group_size,
                     side.integer_zero ? "z" : "", type);
}

WindowLayouts window_layouts_of(const PageLayout& pages, const Windows& windows, int max_rollback) {
  const WindowLayout rows{
      .num_kv_heads = pages.num_kv_heads,
      .k = {pages.k.head_dim, 16, pages.k.head_dim, 0},
      .v = {pages.v.head_dim, 16, pages.v.head_dim, 0},
      .coded_v = pages.v,
  };
  WindowLayouts layouts{rows, rows};
  layouts.sinks.rows = round_up(windows.sink_tokens, kTileTokens);
  if (windows.recent_tokens > 0) layouts.rings.rows = round_up(windows.recent_tokens + max_rollback, kTileTokens);
  return layouts;
}

}  // namespace kvq
