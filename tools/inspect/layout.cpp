#include "inspect/layout.h"

#include "common/layers.h"
#include "common/plural.h"
#include "common/table.h"
#include "common/text_wrap.h"
#include "inspect/serving.h"

#include <fmt/core.h>

#include <algorithm>
#include <optional>

namespace kvq {

namespace {

struct LayoutRow {
  int layer;
  CacheLayout cache;
  std::optional<PageLayout> pages;  ///< missing: pages do not hold the layer, or have no such size
};

std::vector<LayoutRow> layout_rows(const Artifact& artifact, int page_size) {
  std::vector<LayoutRow> rows;
  rows.reserve(artifact.layers.size());
  for (const LayerPlan& layer : artifact.layers) {
    rows.push_back({layer.layer, cache_layout(layer), {}});
    if (is_page_size(page_size) && page_faults(layer).empty()) rows.back().pages = page_layout_of(layer, page_size);
  }
  return rows;
}

/// The largest power of two up to 256 that divides `bytes`, the size of one head's page.
std::int64_t alignment_of(std::int64_t bytes) { return bytes == 0 ? 256 : std::min<std::int64_t>(256, bytes & -bytes); }

/// A part of a row. Dropped channels have width 0 and no bytes; scales, index and padding have no channels.
struct RowPart {
  const char* name;
  int bits = 0, stored_bits = 0;
  int first_channel = 0, channels = 0;
  int byte_offset = 0, bytes = 0;
};

void add_part(std::vector<RowPart>& parts, int& end, const RowPart& part) {
  if (part.byte_offset > end) parts.push_back({.name = "padding", .byte_offset = end, .bytes = part.byte_offset - end});
  if (part.bytes > 0) parts.push_back(part);
  end = part.byte_offset + part.bytes;
}

std::vector<RowPart> row_parts(const TensorPlan& plan, int head, int dim) {
  const RowLayout layout = row_layout(plan, head, dim);
  std::vector<RowPart> parts;
  int end = 0, channel = 0;
  for (int s = 0; s < layout.num_segments; ++s) {
    const CodeSegment& segment = layout.segments[static_cast<std::size_t>(s)];
    add_part(parts, end,
             {
                 .name = "codes",
                 .bits = segment.bits,
                 .stored_bits = segment.stored_bits,
                 .first_channel = segment.first_channel,
                 .channels = segment.channels,
                 .byte_offset = segment.byte_offset,
                 .bytes = (segment.channels * segment.stored_bits + 7) / 8,
             });
    channel = segment.first_channel + segment.channels;
  }
  if (channel < dim)
    parts.push_back({.name = "dropped", .first_channel = channel, .channels = dim - channel, .byte_offset = end});
  if (layout.num_numbers > 0)
    add_part(parts, end,
             {
                 .name = "scales",
                 .byte_offset = layout.numbers_offset,
                 .bytes = layout.num_numbers * scale_bytes(scale_type(plan.coder)),
             });
  if (layout.index_bytes > 0)
    add_part(parts, end, {.name = "index", .byte_offset = layout.index_offset, .bytes = layout.index_bytes});
  add_part(parts, end, {.name = "end", .byte_offset = row_bytes(plan, dim)});
  return parts;
}

std::string span_text(int first, int count) {
  return count == 0 ? "" : fmt::format("{}..{}", first, first + count - 1);
}

std::string bits_text(const RowPart& part) {
  if (part.channels == 0) return "";
  return part.stored_bits == part.bits ? std::to_string(part.bits)
                                       : fmt::format("{} in {}", part.bits, part.stored_bits);
}

/// Why layers have no bytes of pages, or have them and are not served: one paragraph for each reason.
std::string page_refusals(const Artifact& artifact, int page_size) {
  std::string text;
  if (!is_page_size(page_size))
    text += wrapped("pages: ", fmt::format("page_size: supported 16, 32, 64, 128, found {}", page_size));
  for (const ServingGroup& group : serving_groups(artifact))
    if (!group.served.is_served())
      text += wrapped("pages: ", fmt::format("layers {}: {}", range_text(group.layers), serving_text(group)));
  return text;
}

/// Calls `visit(side, plan, dim)` for keys and, if there are any, values.
template <typename Visit>
void for_each_side(const LayerPlan& layer, Visit visit) {
  visit(Side::k, layer.k, layer.geometry.head_dim);
  if (layer.v) visit(Side::v, *layer.v, layer.geometry.v_head_dim);
}

}  // namespace

double token_bytes(const Artifact& artifact) {
  double bytes = 0.0;
  for (const LayerPlan& layer : artifact.layers) bytes += static_cast<double>(cache_layout(layer).token_bytes());
  return bytes;
}

double bf16_token_bytes(const Artifact& artifact) {
  double bytes = 0.0;
  for (const LayerPlan& layer : artifact.layers)
    bytes += 2.0 * layer.geometry.num_kv_heads * (layer.geometry.head_dim + (layer.v ? layer.geometry.v_head_dim : 0));
  return bytes;
}

double cache_bytes(const Artifact& artifact, std::int64_t context) {
  const auto exact = static_cast<double>(
      std::min<std::int64_t>(context, artifact.windows.sink_tokens + artifact.windows.recent_tokens));
  return exact * bf16_token_bytes(artifact) + (static_cast<double>(context) - exact) * token_bytes(artifact);
}

std::string describe_layout(const Artifact& artifact, int page_size, std::int64_t context) {
  std::vector<std::vector<std::string>> rows = {{"layer", "k row", "v row", "bytes/token", "bytes/page", "align"}};
  bool any_pages = false;
  for (const auto& [layer, cache, pages] : layout_rows(artifact, page_size)) {
    rows.push_back({std::to_string(layer), std::to_string(cache.k_row_bytes), std::to_string(cache.v_row_bytes),
                    std::to_string(cache.token_bytes()), pages ? std::to_string(pages->page_bytes()) : "-",
                    pages ? std::to_string(alignment_of(pages->head_bytes())) : "-"});
    any_pages = any_pages || pages;
  }
  std::string text = format_table(rows, "rrrrrr");
  text +=
      wrapped("", any_pages ? fmt::format("row: one token and head, codes and scales. page: {} tokens, all KV heads. "
                                          "align: of one head's page, when pages follow each other.",
                                          page_size)
                            : "row: one token and head, codes and scales.");
  text += page_refusals(artifact, page_size);
  const double coded = cache_bytes(artifact, context),
               exact = bf16_token_bytes(artifact) * static_cast<double>(context);
  text += fmt::format("{}, windows included: {} instead of {} in bf16 ({:.2f}x)\n", counted(context, "token"),
                      format_bytes(coded), format_bytes(exact), exact / coded);
  return text;
}

Json layout_json(const Artifact& artifact, int page_size, std::int64_t context) {
  Json layers = Json::array();
  for (const LayoutRow& row : layout_rows(artifact, page_size)) {
    layers.push_back({{"layer", row.layer},
                      {"k_row_bytes", row.cache.k_row_bytes},
                      {"v_row_bytes", row.cache.v_row_bytes},
                      {"bytes_per_token", row.cache.token_bytes()}});
    layers.back()["bytes_per_page"] = row.pages ? Json(row.pages->page_bytes()) : Json();
    layers.back()["alignment"] = row.pages ? Json(alignment_of(row.pages->head_bytes())) : Json();
  }
  return {{"page_size", page_size},
          {"context", context},
          {"cache_bytes", cache_bytes(artifact, context)},
          {"bf16_bytes", bf16_token_bytes(artifact) * static_cast<double>(context)},
          {"layers", std::move(layers)}};
}

std::string describe_segments(const LayerPlan& layer, int head) {
  std::vector<std::vector<std::string>> rows = {{"side", "part", "bits", "channels", "bytes"}};
  for_each_side(layer, [&](Side side, const TensorPlan& plan, int dim) {
    std::string shown = name(side);  // only in the first line of a side
    for (const RowPart& part : row_parts(plan, head, dim)) {
      rows.push_back({shown, part.name, bits_text(part), span_text(part.first_channel, part.channels),
                      span_text(part.byte_offset, part.bytes)});
      shown.clear();
    }
  });
  return fmt::format("layer {}, head {}: where a row's parts lie, channels after the rotation\n", layer.layer, head) +
         format_table(rows, "llrll");
}

Json segments_json(const LayerPlan& layer, int head) {
  Json json = {{"layer", layer.layer}, {"head", head}};
  for_each_side(layer, [&](Side side, const TensorPlan& plan, int dim) {
    Json parts = Json::array();
    for (const RowPart& part : row_parts(plan, head, dim)) {
      Json entry = {{"part", part.name}, {"byte_offset", part.byte_offset}, {"bytes", part.bytes}};
      if (part.channels > 0)
        entry.update({{"bits", part.bits},
                      {"stored_bits", part.stored_bits},
                      {"first_channel", part.first_channel},
                      {"channels", part.channels}});
      parts.push_back(std::move(entry));
    }
    json[name(side)] = std::move(parts);
  });
  return json;
}

}  // namespace kvq
