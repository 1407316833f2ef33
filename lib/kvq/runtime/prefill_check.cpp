#include <kvq/plan/kernel_limits.h>
#include <kvq/runtime/checks.h>
#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/runtime/kernels/prefill/variant.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace kvq {

namespace {

constexpr int kLeastBlockRows = 64;  ///< rows of a block in the kernel with the smallest blocks

/// Checks an array of rows of 16-bit numbers, one row for each token.
Status check_rows(const char* name, const void* rows, std::int64_t stride, std::int64_t least) {
  if (rows && aligned_to_16(rows) && stride % 8 == 0 && stride >= least) return {};
  return Status::fail(StatusCode::invalid_argument,
                      "prefill: %s must not be null, aligned to 16 bytes, tokens a multiple of 8 and at least %lld "
                      "elements apart, found %lld",
                      name, static_cast<long long>(least), static_cast<long long>(stride));
}

}  // namespace

const PrefillVariant* find_prefill_variant(const DequantizeVariant& rows) {
  for (const PrefillVariant* row : prefill_variants())
    if (row->head_dim == rows.k.head_dim && row->bf16 == rows.bf16 && rows.to_tiles) return row;
  return nullptr;
}

void take_slab(PrefillLaunch& launch, int block_rows, int tile_tokens, std::int64_t tile_bytes) {
  const PrefillShape& shape = launch.shape;
  const int most_rows = shape.max_queries * (shape.num_q_heads / shape.num_kv_heads);
  PrefillSlab& slab = launch.slab;
  slab.first_work_tile = 0;
  slab.tiles = (shape.max_keys + tile_tokens - 1) / tile_tokens;
  slab.row_blocks = (most_rows + block_rows - 1) / block_rows;
  const std::int64_t work_tile_bytes = slab.tiles * tile_bytes,
                     work_tiles = std::int64_t{shape.batch} * shape.num_kv_heads;
  const std::int64_t fit =
      shape.workspace_bytes && work_tile_bytes ? shape.workspace_bytes / work_tile_bytes : work_tiles;
  slab.work_tiles = static_cast<int>(std::clamp<std::int64_t>(fit, std::min<std::int64_t>(work_tiles, 1), work_tiles));
  launch.workspace_bytes = slab.work_tiles * work_tile_bytes;
}

Status check_prefill_shape(const PrefillVariant& variant, const DequantizeVariant& rows, const PrefillShape& s) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (variant.head_dim != rows.k.head_dim || variant.bf16 != rows.bf16 || (variant.tuned && !rows.to_tiles))
    return Status::fail(StatusCode::unsupported, "prefill: %s does not go with %s", rows.name, variant.name);
  if (s.batch < 0 || s.max_queries < 0 || s.max_keys < s.max_queries || s.workspace_bytes < 0)
    return Status::fail(kBad, "prefill: a batch of %d, chunks of up to %d among up to %d keys, %lld bytes of workspace",
                        s.batch, s.max_queries, s.max_keys, static_cast<long long>(s.workspace_bytes));
  if (s.num_kv_heads < 1 || s.num_q_heads < s.num_kv_heads || s.num_q_heads % s.num_kv_heads != 0)
    return Status::fail(kBad, "prefill: %d query heads and %d KV heads, expected a multiple", s.num_q_heads,
                        s.num_kv_heads);
  const Status heads = check_kv_heads("prefill", s.num_kv_heads);
  if (!heads.ok()) return heads;
  if (s.num_q_heads / s.num_kv_heads > kMostPrefillHeads)
    return Status::fail(StatusCode::unsupported, "prefill: %d query heads for each KV head, supported are at most %d",
                        s.num_q_heads / s.num_kv_heads, kMostPrefillHeads);
  // Rows of a work tile, and blocks of a launch, are counted in int.
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  const std::int64_t item_rows = std::int64_t{s.max_queries} * (s.num_q_heads / s.num_kv_heads),
                     work_tiles = std::int64_t{s.batch} * s.num_kv_heads;
  if (s.max_keys > kMost / 2 || item_rows > kMost / 2 || work_tiles > kMost ||
      (item_rows / kLeastBlockRows + 1) * work_tiles > kMost)
    return Status::fail(StatusCode::unsupported,
                        "prefill: a batch of %d, chunks of up to %d among up to %d keys, %d query heads: more than one "
                        "launch holds",
                        s.batch, s.max_queries, s.max_keys, s.num_q_heads);
  return {};
}

Status check_prefill(const PrefillVariant& variant, const DequantizeVariant& rows, const PrefillLaunch& launch,
                     const PrefillParams& p) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  const PrefillShape& s = launch.shape;
  const Status shape = check_prefill_shape(variant, rows, s);
  if (!shape.ok()) return shape;
  if (p.cache.batch > s.batch || p.num_q_heads != s.num_q_heads || p.cache.num_kv_heads != s.num_kv_heads)
    return Status::fail(kBad,
                        "prefill: a batch of %d, %d query heads and %d KV heads, but the plan is for up to %d, %d and "
                        "%d",
                        p.cache.batch, p.num_q_heads, p.cache.num_kv_heads, s.batch, s.num_q_heads, s.num_kv_heads);
  if (!(p.softmax_scale > 0.0f)) return Status::fail(kBad, "prefill: softmax_scale must be above 0");
  if (p.sliding_window < 0)
    return Status::fail(kBad, "prefill: sliding_window is %d, expected 0 or more", p.sliding_window);
  if (!(p.logit_softcap >= 0.0f) || std::isinf(p.logit_softcap))
    return Status::fail(kBad, "prefill: logit_softcap must be 0 or a number above 0");
  const Status cache = check_cache("prefill", rows, p.cache);
  if (!cache.ok() || p.cache.batch == 0) return cache;
  if (!variant.tuned)  // reads rows with the generic kernel
    if (const Status status = check_row_codes("prefill", p.cache, rows.k, rows.v); !status.ok()) return status;
  if (p.num_tokens < 0) return Status::fail(kBad, "prefill: num_tokens is %d, expected 0 or more", p.num_tokens);
  if (!p.q_indptr) return Status::fail(kBad, "prefill: q_indptr must not be null");
  const Status numbers = check_numbers("prefill", "q_indptr, prefix_lens, lse_natural and sink_logits",
                                       {p.q_indptr, p.prefix_lens, p.lse, p.sink_logits}, 4);
  if (!numbers.ok()) return numbers;
  const std::int64_t q_heads = p.num_q_heads, kv_heads = p.cache.num_kv_heads;
  for (const Status& status : {check_rows("q", p.q, p.q_stride, q_heads * rows.k.head_dim),
                               check_rows("k", p.k, p.k_stride, kv_heads * rows.k.head_dim),
                               check_rows("v", p.v, p.v_stride, kv_heads * rows.v.head_dim),
                               check_rows("out", p.out, p.out_stride, q_heads * rows.v.head_dim)})
    if (!status.ok()) return status;
  if (launch.workspace_bytes > 0 && (!p.workspace || !aligned_to_16(p.workspace)))
    return Status::fail(kBad, "prefill: a workspace of %lld bytes is needed, aligned to 16",
                        static_cast<long long>(launch.workspace_bytes));
  return {};
}

}  // namespace kvq
