#include <kvq/runtime/checks.h>
#include <kvq/runtime/kernels/dequantize/variant.h>

#include <cstdint>

namespace kvq {

namespace {

Status check_rotation(const char* verb, const char* side, const DeviceRotation& rotation, int head_dim) {
  if (rotation.matrix || rotation.order <= 0) return {};
  if ((rotation.order & (rotation.order - 1)) != 0 || head_dim % rotation.order != 0)
    return Status::fail(StatusCode::invalid_argument,
                        "%s: %s: a Hadamard order of %d, expected a power of two that divides %d", verb, side,
                        rotation.order, head_dim);
  return {};
}

}  // namespace

const DequantizeVariant* find_dequantize_variant(const DequantizeKey& key) {
  for (const DequantizeVariant* row : dequantize_variants()) {
    if (!same_format(row->k, key.k) || !same_format(row->v, key.v) || row->bf16 != key.bf16) continue;
    if (!key.k.exact() && (row->k_bfloat != key.k_bfloat || row->v_bfloat != key.v_bfloat)) continue;
    return row;
  }
  return nullptr;
}

Status check_cache(const char* verb, const DequantizeVariant& variant, const PagedCacheView& c) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (c.batch < 0 || c.num_kv_heads < 1)
    return Status::fail(kBad, "%s: a batch of %d and %d KV heads, expected 0 or more and 1 or more", verb, c.batch,
                        c.num_kv_heads);
  const Status heads = check_kv_heads(verb, c.num_kv_heads);
  if (!heads.ok()) return heads;
  if (c.page_shift < 4 || c.page_shift > 6)
    return Status::fail(StatusCode::unsupported, "%s: pages of 2^%d tokens; supported are 16, 32 and 64", verb,
                        c.page_shift);
  if (c.sink_tokens < 0 || c.recent_tokens < 0)
    return Status::fail(kBad, "%s: sink_tokens and recent_tokens must be 0 or more, found %d and %d", verb,
                        c.sink_tokens, c.recent_tokens);
  const Status k = check_rotation(verb, "k", c.rotation_k, variant.k.head_dim);
  if (!k.ok()) return k;
  const Status v = check_rotation(verb, "v", c.rotation_v, variant.v.head_dim);
  if (!v.ok()) return v;
  if (c.batch == 0) return {};
  if (!c.seq_lens || !c.pages || !c.page_table)
    return Status::fail(kBad, "%s: seq_lens, pages and page_table must not be null", verb);
  if (c.batch > 1 && !c.page_indptr && c.page_table_stride < 1)
    return Status::fail(kBad, "%s: page_table_stride is %lld, expected 1 or more", verb,
                        static_cast<long long>(c.page_table_stride));
  const PageLayout layout{variant.k, variant.v, c.num_kv_heads, 1 << c.page_shift};
  if (!aligned_to_16(c.pages) || c.page_stride % 16 != 0 || c.page_stride < layout.page_bytes())
    return Status::fail(kBad, "%s: pages must be aligned to 16 bytes and at least %lld bytes apart, found %lld", verb,
                        static_cast<long long>(layout.page_bytes()), static_cast<long long>(c.page_stride));
  if (c.sink_tokens + c.recent_tokens > 0) {
    const WindowLayout& w = c.window_layout;
    if (!c.windows || !c.window_slots || !aligned_to_16(c.windows))
      return Status::fail(kBad, "%s: exact windows need `windows`, aligned to 16 bytes, and `window_slots`", verb);
    if (w.num_kv_heads != c.num_kv_heads || !same_format(w.k, TileSide{variant.k.head_dim, 16, 0, 0}) ||
        !same_format(w.v, TileSide{variant.v.head_dim, 16, 0, 0}) || !same_format(w.coded_v, variant.v))
      return Status::fail(kBad, "%s: the window layout is not that of %s", verb, variant.name);
    if (w.sink_rows < c.sink_tokens || w.ring_rows < c.recent_tokens || w.sink_rows % kTileTokens ||
        w.ring_rows % kTileTokens)
      return Status::fail(kBad, "%s: %d sink and %d ring rows do not hold %d sink and %d recent tokens in tiles of %d",
                          verb, w.sink_rows, w.ring_rows, c.sink_tokens, c.recent_tokens, kTileTokens);
  }
  return {};
}

Status check_dequantize(const DequantizeVariant& variant, const DequantizeParams& p) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  const Status cache = check_cache("dequantize", variant, p.cache);
  if (!cache.ok() || p.cache.batch == 0) return cache;
  if (!p.out_indptr || !p.k || !p.v) return Status::fail(kBad, "dequantize: out_indptr, k and v must not be null");
  const std::int64_t k_row = std::int64_t{p.cache.num_kv_heads} * variant.k.head_dim,
                     v_row = std::int64_t{p.cache.num_kv_heads} * variant.v.head_dim;
  if (!aligned_to_16(p.k) || !aligned_to_16(p.v) || p.k_stride % 8 != 0 || p.v_stride % 8 != 0 || p.k_stride < k_row ||
      p.v_stride < v_row)
    return Status::fail(kBad,
                        "dequantize: k and v must be aligned to 16 bytes, tokens a multiple of 8 and at least %lld "
                        "and %lld elements apart, found %lld and %lld",
                        static_cast<long long>(k_row), static_cast<long long>(v_row),
                        static_cast<long long>(p.k_stride), static_cast<long long>(p.v_stride));
  return {};
}

}  // namespace kvq
