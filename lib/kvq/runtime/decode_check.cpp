#include <kvq/runtime/checks.h>
#include <kvq/runtime/kernels/decode/variant.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <utility>

namespace kvq {

const DecodeVariant* find_decode_variant(const DecodeKey& key) {
  const DecodeVariant* best = nullptr;
  for (const DecodeVariant* variant : decode_variants()) {
    if (!same_format(variant->k, key.k) || !same_format(variant->v, key.v) || variant->bf16 != key.bf16) continue;
    if (!key.k.exact() && (variant->k_bfloat != key.k_bfloat || variant->v_bfloat != key.v_bfloat)) continue;
    const auto passes = [&](const DecodeVariant& of) {
      return make_decode_passes(of.max_rows, key.heads, key.new_tokens).count;
    };
    if (!best || passes(*variant) < passes(*best) ||
        (passes(*variant) == passes(*best) && variant->max_rows < best->max_rows))
      best = variant;
  }
  return best;
}

DecodeWorkspace decode_workspace(const DecodeLaunch& launch, std::size_t work_tiles) {
  return make_decode_workspace(work_tiles, static_cast<std::size_t>(launch.cut_partials),
                               static_cast<std::size_t>(launch.partial_bytes),
                               static_cast<std::size_t>(launch.operand_bytes));
}

std::size_t decode_workspace_bytes(const DecodeLaunch& launch, std::size_t work_tiles) {
  return decode_workspace(launch, work_tiles).total;
}

std::size_t decode_work_tiles(const DecodeVariant& variant, int batch, int num_kv_heads, int heads_per_kv_head,
                              int max_new_tokens) {
  const DecodePasses passes = make_decode_passes(variant.max_rows, heads_per_kv_head, max_new_tokens);
  return static_cast<std::size_t>(batch) * static_cast<std::size_t>(passes.count) *
         static_cast<std::size_t>(num_kv_heads);
}

Status check_decode(const DecodeVariant& variant, const DecodeParams& p) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (p.cache.num_kv_heads < 1 || p.num_q_heads < p.cache.num_kv_heads || p.num_q_heads % p.cache.num_kv_heads != 0)
    return Status::fail(kBad, "decode: %d query heads and %d KV heads, expected a multiple", p.num_q_heads,
                        p.cache.num_kv_heads);
  if (!variant.tuned && p.num_q_heads / p.cache.num_kv_heads > variant.max_rows)
    return Status::fail(StatusCode::unsupported, "decode: %d query heads for each KV head, %s has at most %d",
                        p.num_q_heads / p.cache.num_kv_heads, variant.name, variant.max_rows);
  if (!(p.softmax_scale > 0.0f)) return Status::fail(kBad, "decode: softmax_scale must be above 0");
  if (p.sliding_window < 0)
    return Status::fail(kBad, "decode: sliding_window is %d, expected 0 or more", p.sliding_window);
  if (!(p.logit_softcap >= 0.0f) || std::isinf(p.logit_softcap))
    return Status::fail(kBad, "decode: logit_softcap must be 0 or a number above 0");
  if (p.max_new_tokens < 1 || p.max_new_tokens > kMostNewTokens)
    return Status::fail(kBad, "decode: max_new_tokens is %d, expected 1 to %d", p.max_new_tokens, kMostNewTokens);
  if (!p.q_indptr && (p.max_new_tokens > 1 || p.token_masks))
    return Status::fail(kBad, "decode: several new tokens of a sequence, and masks, need q_indptr");
  if (p.q_indptr && p.num_tokens < 0)
    return Status::fail(kBad, "decode: num_tokens is %d, expected 0 or more", p.num_tokens);
  const Status cache = check_cache_view("decode", p.cache, variant.k, variant.v);
  if (!cache.ok() || p.cache.batch == 0) return cache;
  const std::int64_t row = std::int64_t{p.num_q_heads} * variant.k.head_dim,
                     out_row = std::int64_t{p.num_q_heads} * variant.v.head_dim;
  const std::int64_t tokens = p.tokens();
  if (tokens == 0) return {};
  if (!p.q || !p.out || !p.workspace) return Status::fail(kBad, "decode: q, out and workspace must not be null");
  if (!aligned_to_16(p.q) || p.q_stride % 8 != 0 || (tokens > 1 && p.q_stride < row))
    return Status::fail(kBad, "decode: q must be aligned to 16 bytes and tokens at least %lld elements apart",
                        static_cast<long long>(row));
  if (tokens > 1 && p.out_stride < out_row)
    return Status::fail(kBad, "decode: out_stride is %lld, expected %lld or more", static_cast<long long>(p.out_stride),
                        static_cast<long long>(out_row));
  if (const Status status = check_numbers("decode", "out", {p.out}, 2); !status.ok()) return status;
  if (const Status status = check_numbers("decode", "lse_natural, sink_logits, q_indptr, masks, first and last",
                                          {p.lse, p.sink_logits, p.q_indptr, p.token_masks, p.first, p.last}, 4);
      !status.ok())
    return status;
  if (std::max(tokens, std::int64_t{p.cache.batch} * p.max_new_tokens) * p.num_q_heads > INT32_MAX)
    return Status::fail(StatusCode::unsupported,
                        "decode: %d sequences of up to %d tokens of %d query heads; supported are %d in all",
                        p.cache.batch, p.max_new_tokens, p.num_q_heads, INT32_MAX);
  for (const auto& [side, rotation] : {std::pair{"k", &p.cache.rotation_k}, std::pair{"v", &p.cache.rotation_v}})
    if (variant.tuned && rotation->matrix && (!rotation->fragments || !aligned_to_16(rotation->fragments)))
      return Status::fail(kBad, "decode: %s: a dense rotation needs its `fragments` too, aligned to 16 bytes", side);
  for (const auto& [side, tile, taps] :
       {std::tuple{"k", &variant.k, &p.cache.rotation_k.taps}, std::tuple{"v", &variant.v, &p.cache.rotation_v.taps}})
    if (variant.tuned && is_linear_format(*tile) &&
        (!taps->weights || !taps->sources || !aligned_to_16(taps->weights) || !aligned_to_16(taps->sources)))
      return Status::fail(kBad, "decode: %s: linear rows need `taps`, aligned to 16 bytes", side);
  for (const auto& [side, tile, code] :
       {std::tuple{"k", &variant.k, &p.cache.code_k}, std::tuple{"v", &variant.v, &p.cache.code_v}})
    if (variant.tuned && tile->table_bits > 0 && (!code->weights || !code->levels || !aligned_to_16(code->levels)))
      return Status::fail(kBad, "decode: %s: codebook codes need `weights`, and `levels` aligned to 16 bytes", side);
  if (variant.tuned && variant.k.segments &&
      (!p.cache.code_k.programs || !aligned_to_16(p.cache.code_k.programs) ||
       !aligned_to_16(p.cache.code_k.program_taps.weights) || !aligned_to_16(p.cache.code_k.program_taps.sources)))
    return Status::fail(kBad,
                        "decode: k: codebook codes of mixed widths need `programs` and `program_taps`, "
                        "aligned to 16 bytes");
  if (const Status status = variant.tuned ? check_centroids("decode", p.cache, variant.k, variant.v)
                                          : check_row_codes("decode", p.cache, variant.k, variant.v);
      !status.ok())
    return status;
  if (reinterpret_cast<std::uintptr_t>(p.workspace) % 256 != 0)
    return Status::fail(kBad, "decode: workspace must be aligned to 256 bytes");
  return {};
}

}  // namespace kvq
