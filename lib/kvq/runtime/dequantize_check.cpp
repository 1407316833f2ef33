#include <kvq/runtime/checks.h>
#include <kvq/runtime/kernels/dequantize/variant.h>

#include <cstdint>
#include <tuple>

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
  const Status view = check_cache_view(verb, c, variant.k, variant.v);
  if (!view.ok()) return view;
  if (const Status status = variant.tuned && !variant.decoded.any() ? check_centroids(verb, c, variant.k, variant.v)
                                                                    : check_row_codes(verb, c, variant.k, variant.v);
      !status.ok())
    return status;
  for (const auto& [side, tile, code] :
       {std::tuple{"k", &variant.k, &c.code_k}, std::tuple{"v", &variant.v, &c.code_v}})
    if (variant.tuned && tile->index_bytes > 0 && (!code->centroids || !aligned_to_16(code->centroids)))
      return Status::fail(StatusCode::invalid_argument,
                          "%s: %s: rows with centroids need `centroids`, aligned to 16 bytes", verb, side);
  if (variant.tuned && variant.k.is_bits())
    for (const DeviceRotation* rotation : {&c.rotation_k, &c.rotation_v})
      if (!rotation->row_matrices || !aligned_to_16(rotation->row_matrices))
        return Status::fail(StatusCode::invalid_argument,
                            "%s: rows in bit tiles: their matrices must not be null, and aligned to 16 bytes", verb);
  const Status k = check_rotation(verb, "k", c.rotation_k, variant.k.head_dim);
  return k.ok() ? check_rotation(verb, "v", c.rotation_v, variant.v.head_dim) : k;
}

Status check_dequantize(const DequantizeVariant& variant, const DequantizeParams& p) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  const Status cache = check_cache("dequantize", variant, p.cache);
  if (!cache.ok() || p.cache.batch == 0) return cache;
  if (p.num_rows < 0) return Status::fail(kBad, "dequantize: num_rows is %d, expected 0 or more", p.num_rows);
  if (!p.out_indptr || !p.k || !p.v) return Status::fail(kBad, "dequantize: out_indptr, k and v must not be null");
  const Status numbers = check_numbers("dequantize", "first, last and out_indptr", {p.first, p.last, p.out_indptr}, 4);
  if (!numbers.ok()) return numbers;
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
