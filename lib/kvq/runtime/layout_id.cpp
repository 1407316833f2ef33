#include <kvq/plan/layer_pages.h>
#include <kvq/runtime/layout_id.h>

#include <fmt/format.h>

namespace kvq {

namespace {

/// What is stored, whichever kernels read it.
std::string stored_name(TileSide side, bool bfloat) {
  side.table_bits = 0, side.segments = false;
  return side_name(side, bfloat);
}

}  // namespace

std::string layout_text(const LoadedModel& model) {
  // The artifact's hash stands for rotations, centers, clips and the rules of scales.
  std::string text =
      fmt::format("pages {}\nartifact {}\npage_size {}\nsink_tokens {}\nrecent_tokens {}\n", kPagesMajor,
                  model.content_hash, model.claim.page_size, model.windows.sink_tokens, model.windows.recent_tokens);
  for (const LoadedLayer& layer : model.layers) {
    const PageLayout& pages = layer.pages;
    text += fmt::format("layer {}: KV heads {} from {}, k {} {}, v {} {}, sink rows {}, ring rows {}\n",
                        layer.plan.layer, pages.num_kv_heads, layer.heads.first_kv, pages.k.head_dim,
                        stored_name(pages.k, layer.key.k_bfloat), pages.v.head_dim,
                        stored_name(pages.v, layer.key.v_bfloat), layer.windows.sinks.rows, layer.windows.rings.rows);
  }
  return text;
}

std::uint64_t layout_id(const LoadedModel& model) {
  std::uint64_t hash = 0xCBF29CE484222325;
  for (const char c : layout_text(model)) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return hash;
}

}  // namespace kvq
