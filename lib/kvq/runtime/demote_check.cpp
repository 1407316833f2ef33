#include <kvq/runtime/checks.h>
#include <kvq/runtime/kernels/demote/variant.h>

namespace kvq {

namespace {

constexpr StatusCode kBad = StatusCode::invalid_argument;

Status check_side(const char* side, const TileSide& tile, const WriteSide& w) {
  if (tile.exact()) return {};
  if (w.clip_ranks && w.rule != ScaleRule::minmax)
    return Status::fail(kBad, "demote: %s: a clip goes with scale rule minmax, found %s", side, to_string(w.rule));
  const bool affine = w.rule == ScaleRule::minmax;
  if (affine != (tile.numbers == 2) || w.rule == ScaleRule::rms)
    return Status::fail(kBad, "demote: %s: scale rule %s does not go with %s codes", side, to_string(w.rule),
                        tile.numbers == 2 ? "affine" : "symmetric");
  return {};
}

}  // namespace

Status check_demote(const DemoteVariant& variant, const DemoteParams& p) {
  if (p.num_layers < 0 || p.num_layers > 65535 || p.num_kv_heads < 1 || p.max_demotions < 0)
    return Status::fail(kBad, "demote: %d demotions of %d KV heads in %d layers", p.max_demotions, p.num_kv_heads,
                        p.num_layers);
  const Status heads = check_kv_heads("demote", p.num_kv_heads);
  if (!heads.ok()) return heads;
  if (p.page_shift < 4 || p.page_shift > 6)
    return Status::fail(StatusCode::unsupported, "demote: pages of 2^%d tokens; supported are 16, 32 and 64",
                        p.page_shift);
  if (p.max_demotions == 0 || p.num_layers == 0) return {};
  if (!p.layers || !p.num_demotions || !p.demote_from || !p.demote_to)
    return Status::fail(kBad, "demote: layers, num_demotions, demote_from and demote_to must not be null");
  const PageLayout layout{variant.k, variant.v, p.num_kv_heads, 1 << p.page_shift};
  if (p.page_stride % 16 != 0 || p.page_stride < layout.page_bytes())
    return Status::fail(kBad, "demote: pages must be a multiple of 16 and at least %lld bytes apart, found %lld",
                        static_cast<long long>(layout.page_bytes()), static_cast<long long>(p.page_stride));
  const Status stride = check_write_stride("demote", p.page_stride);
  if (!stride.ok()) return stride;
  if (!windows_of(p.window_layout, variant.k, variant.v, p.num_kv_heads))
    return Status::fail(kBad, "demote: the window layout is not that of %s", variant.name);
  return {};
}

Status check_demote_layer(const DemoteVariant& variant, const DemoteLayer& layer) {
  if (!layer.windows || !layer.pages || !aligned_to_16(layer.windows) || !aligned_to_16(layer.pages))
    return Status::fail(kBad, "demote: windows and pages must be there, aligned to 16 bytes");
  const Status k = check_side("k", variant.k, layer.k);
  return k.ok() ? check_side("v", variant.v, layer.v) : k;
}

}  // namespace kvq
