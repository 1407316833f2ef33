#include <kvq/runtime/checks.h>
#include <kvq/runtime/kernels/quantize_write/dense_layout.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>

#include <tuple>

namespace kvq {

namespace {

/// Coded rows (RowCode) belong to bit tiles and indices.
Status check_code(const char* side, const TileSide& tile, const WriteSide& w) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (tile.is_bits() != (w.code.heads != nullptr))
    return Status::fail(kBad, "quantize_write: %s: rows of heads must be given for bit tiles and for no others", side);
  if ((tile.index_bytes > 0) != (w.code.num_centroids > 0) || (w.code.num_centroids > 0 && !w.code.centroids))
    return Status::fail(kBad, "quantize_write: %s: %d centroids, and %d bytes of their index", side,
                        w.code.num_centroids, tile.index_bytes);
  if (w.code.num_centroids > 0 && !aligned_to_16(w.code.centroids))
    return Status::fail(kBad, "quantize_write: %s: centroids must be aligned to 16 bytes", side);
  if (w.code.num_centroids > 0 && (w.center || w.factors))
    return Status::fail(kBad, "quantize_write: %s: centroids and %s; expected one of both", side,
                        w.center ? "centers" : "factors of channels");
  return {};
}

Status check_side(const char* side, const TileSide& tile, const WriteSide& w, int num_kv_heads) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  const bool by_eight = tile.head_dim % 8 == 0;  // rows are loaded so
  if (!w.x || (by_eight && (!aligned_to_16(w.x) || w.token_stride % 8 != 0)) ||
      w.token_stride < std::int64_t{num_kv_heads} * tile.head_dim)
    return Status::fail(kBad, "quantize_write: %s: rows must be aligned to 16 bytes, tokens at least %d elements apart",
                        side, num_kv_heads * tile.head_dim);
  if (w.token_stride > kMostWriteStride)
    return Status::fail(StatusCode::unsupported,
                        "quantize_write: %s: tokens %lld elements apart; supported are fewer than 2^32", side,
                        static_cast<long long>(w.token_stride));
  if (w.order < 1 || (w.order & (w.order - 1)) != 0 || tile.head_dim % w.order != 0)
    return Status::fail(kBad, "quantize_write: %s: a Hadamard order of %d, expected a power of two that divides %d",
                        side, w.order, tile.head_dim);
  if (!aligned_to_16(w.signs)) return Status::fail(kBad, "quantize_write: %s: signs must be aligned to 16 bytes", side);
  if (!aligned_to_16(w.factors))
    return Status::fail(kBad, "quantize_write: %s: factors must be aligned to 16 bytes", side);
  if (w.factors && (!w.row_scales || w.signs || tile.exact()))
    return Status::fail(kBad, "quantize_write: %s: factors go with row scales, without signs, and not with exact rows",
                        side);
  if (!aligned_to_16(w.center))
    return Status::fail(kBad, "quantize_write: %s: centers must be aligned to 16 bytes", side);
  if (w.rotation) {
    if (w.order != 1 || w.signs || w.factors)
      return Status::fail(kBad,
                          "quantize_write: %s: a dense rotation beside Hadamard blocks of order %d%s; expected one",
                          side, w.order,
                          w.signs     ? " and signs"
                          : w.factors ? " and factors"
                                      : "");
    const long long bytes = RotationLayout{tile.head_dim}.bytes();
    if (!aligned_to_16(w.rotation) || w.rotation_stride % 16 != 0 ||
        (w.rotation_stride != 0 && w.rotation_stride < bytes))
      return Status::fail(kBad,
                          "quantize_write: %s: packed rotations must be aligned to 16 bytes and %lld bytes apart, or "
                          "one for all heads, found %lld",
                          side, bytes, static_cast<long long>(w.rotation_stride));
  }
  if (w.clip_ranks && w.rule != ScaleRule::minmax)
    return Status::fail(kBad, "quantize_write: %s: a clip goes with scale rule minmax, found %s", side,
                        to_string(w.rule));
  if (const Status status = check_code(side, tile, w); !status.ok() || tile.exact() || tile.is_bits()) return status;
  const bool affine = w.rule == ScaleRule::minmax;
  if (affine != (tile.numbers == 2) || w.rule == ScaleRule::rms)
    return Status::fail(kBad, "quantize_write: %s: scale rule %s does not go with %s codes", side, to_string(w.rule),
                        tile.numbers == 2 ? "affine" : "symmetric");
  return {};
}

Status check_windows(const WriteVariant& variant, const WriteParams& p) {
  for (const auto& [name, rows, layout] :
       {std::tuple{"sinks", p.sinks, &p.sink_layout}, std::tuple{"rings", p.rings, &p.ring_layout}}) {
    const Status status =
        check_window_pool("quantize_write", name, rows, *layout, layout->rows, variant.k, variant.v, p.num_kv_heads);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace

Status check_write(const WriteVariant& variant, const WriteParams& p) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (p.num_tokens < 0 || p.num_kv_heads < 1)
    return Status::fail(kBad, "quantize_write: %d tokens of %d KV heads", p.num_tokens, p.num_kv_heads);
  const Status heads = check_kv_heads("quantize_write", p.num_kv_heads);
  if (!heads.ok()) return heads;
  if (const Status status = check_page_shift("quantize_write", p.page_shift); !status.ok()) return status;
  if (p.num_tokens == 0) return {};
  const PageLayout layout{variant.k, variant.v, p.num_kv_heads, 1 << p.page_shift};
  if (!p.slot_mapping) return Status::fail(kBad, "quantize_write: slot_mapping must not be null");
  if ((!p.pages && p.extents.num_pages > 0) || !aligned_to_16(p.pages) || p.page_stride % 16 != 0 ||
      p.page_stride < layout.page_bytes())
    return Status::fail(kBad,
                        "quantize_write: pages must be aligned to 16 bytes and at least %lld bytes apart, found %lld",
                        static_cast<long long>(layout.page_bytes()), static_cast<long long>(p.page_stride));
  const Status mappings =
      check_numbers("quantize_write", "slot_mapping and window_mapping", {p.slot_mapping, p.window_mapping}, 8);
  if (!mappings.ok()) return mappings;
  const Status stride = check_write_stride("quantize_write", p.page_stride);
  if (!stride.ok()) return stride;
  if (p.window_mapping) {
    const Status windows = check_windows(variant, p);
    if (!windows.ok()) return windows;
  }
  for (const auto& [side, rows, rule] :
       {std::tuple{"k", variant.k_rows, p.k.rule}, std::tuple{"v", variant.v_rows, p.v.rule}})
    if (rows.any() && rule != ScaleRule::norm && rule != ScaleRule::rms)
      return Status::fail(
          StatusCode::unsupported,
          "quantize_write: %s: scale rule %s; the kernels for codebook and trellis codes support norm and rms", side,
          to_string(rule));
  const Status k = check_side("k", variant.k, p.k, p.num_kv_heads);
  return k.ok() ? check_side("v", variant.v, p.v, p.num_kv_heads) : k;
}

}  // namespace kvq
