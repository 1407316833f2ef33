#include <kvq/plan/layer_pages.h>

#include <kvq/core/error.h>
#include <kvq/plan/segment_rows.h>
#include <kvq/plan/table_rows.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

namespace kvq {

namespace {

bool has_integer_zero(const Coder& coder) {
  const auto* uniform = std::get_if<UniformCoder>(&coder);
  return uniform && uniform->levels == UniformLevels::affine && uniform->zero == ZeroKind::integer;
}

/// Whether code tiles hold a side's rows: pages.md, the table of "Parameters, and what fits".
bool fits_code_tiles(const TensorPlan& plan, int dim) {
  const auto* coder = std::get_if<UniformCoder>(&plan.coder);
  return coder && !plan.allocation && coder->bits >= 2 && coder->bits <= 4 && dim * coder->bits % 128 == 0 &&
         coder->group_size % 32 == 0;
}

/// What the longest row of any head needs, in words of bits and in numbers.
struct RowNeeds {
  int words = 1, numbers = 0;
};
RowNeeds row_needs(const TensorPlan& plan, int dim) {
  const std::size_t heads = plan.allocation ? plan.allocation->channel_bits.size() / static_cast<std::size_t>(dim) : 1;
  RowNeeds most;
  for (int head = 0; head < static_cast<int>(heads); ++head) {
    int bits = 0;
    for (const BitSegment& segment : bit_segments(plan, head, dim)) bits += segment.channels * segment.bits;
    most.words = std::max(most.words, (bits + 31) / 32);
    most.numbers = std::max(most.numbers, row_layout(plan, head, dim).num_numbers);
  }
  return most;
}

}  // namespace

TileSide tile_side(const TensorPlan& plan, int dim) {
  // Exact rows have no groups, but code divides by group_size: it is head_dim, as in WindowLayout's defaults.
  if (is_exact(plan.coder)) return {dim, 16, dim, 0};
  TileSide side{
      .head_dim = dim,
      .bits = code_bits(plan.coder),
      .group_size = group_size(plan.coder),
      .numbers = numbers_per_group(plan.coder),
      .number_size = scale_bytes(scale_type(plan.coder)),
      .integer_zero = has_integer_zero(plan.coder),
      .index_bytes = index_bytes(plan),
  };
  if (fits_code_tiles(plan, dim)) return side;
  const RowNeeds needs = row_needs(plan, dim);
  side.bits = 0;
  side.group_size = dim;
  side.numbers = needs.numbers;
  side.row_words = needs.words;
  side.table_bits = table_bits(plan, dim);
  side.segments = has_segment_rows(plan, dim);
  return side;
}

std::string PageFault::text() const { return fmt::format("{}: supported {}, found {}", what, supported, found); }

std::vector<PageFault> page_faults(const LayerPlan& plan) {
  std::vector<PageFault> faults;
  if (!plan.v) faults.push_back({Side::v, "values", "layers that have them", "none"});
  for (const Side side : kSides)
    if (const TensorPlan* of = plan.side(side); of && is_exact(of->coder) && plan.geometry.dim(side) % 16 != 0)
      faults.push_back({side, "head_dim of exact rows", "multiples of 16", fmt::format("{}", plan.geometry.dim(side))});
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

int page_row_bytes(const TensorPlan& plan, int dim) { return tile_side(plan, dim).bytes() / kTileTokens; }

bool has_bfloat_scales(const TensorPlan& plan) {
  return !is_exact(plan.coder) && scale_type(plan.coder) == ScaleType::bf16;
}

ScaleType number_type_of(const TileSide& side, bool bfloat) {
  return side.number_size == 4 ? ScaleType::fp32 : bfloat ? ScaleType::bf16 : ScaleType::fp16;
}

std::vector<BitSegment> bit_segments(const TensorPlan& plan, int kv_head, int dim) {
  const RowLayout row = row_layout(plan, kv_head, dim);
  std::vector<BitSegment> segments;
  int first_bit = 0;
  for (const CodeSegment& of : std::span(row.segments).first(static_cast<std::size_t>(row.num_segments))) {
    segments.push_back({of.bits, of.first_channel, of.channels, first_bit});
    first_bit += of.channels * of.bits;
  }
  return segments;
}

std::string side_name(const TileSide& side, bool bfloat) {
  if (side.exact()) return "bf16";
  const std::string codes = side.is_bits()
                                ? fmt::format("w{}n{}", side.row_words, side.numbers)
                                : fmt::format("{}{}g{}", side.numbers == 2 ? 'u' : 's', side.bits, side.group_size);
  const char* type = side.number_size == 4 ? "f" : bfloat ? "b" : "";
  const std::string index = side.index_bytes > 0 ? fmt::format("i{}", side.index_bytes) : "",
                    table = side.table_bits > 0 ? fmt::format("t{}", side.table_bits)
                            : side.segments     ? "c"
                                                : "";
  return codes + (side.integer_zero ? "z" : "") + type + index + table;
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
