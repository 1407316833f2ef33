#pragma once

#include <kvq/core/status.h>
#include <kvq/plan/page_layout.h>
#include <kvq/runtime/kernels/common/format.h>
#include <kvq/runtime/kernels/common/page_view.h>

#include <cstdint>
#include <initializer_list>

/// Checks that several kernels share.
namespace kvq {

inline bool aligned_to(const void* pointer, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}
inline bool aligned_to_16(const void* pointer) { return aligned_to(pointer, 16); }

/// Checks arrays of numbers of the same size. @param names  of all arrays, for the message
inline Status check_numbers(const char* verb, const char* names, std::initializer_list<const void*> arrays,
                            std::uintptr_t bytes) {
  for (const void* array : arrays)
    if (!aligned_to(array, bytes))
      return Status::fail(StatusCode::invalid_argument, "%s: %s must be aligned to %d bytes", verb, names,
                          static_cast<int>(bytes));
  return {};
}

/// The heads of both sides are a grid dimension, which is at most 65535; and a page's bytes must fit an int.
constexpr int kMostKvHeads = 32767;

/// Largest distance of pages in bytes and of tokens in elements, because write kernels multiply by 32-bit numbers.
constexpr std::int64_t kMostWriteStride = 0xFFFFFFFF;

/// @param verb  name of the operation, for messages
inline Status check_kv_heads(const char* verb, int num_kv_heads) {
  if (num_kv_heads <= kMostKvHeads) return {};
  return Status::fail(StatusCode::unsupported, "%s: %d KV heads; supported are at most %d", verb, num_kv_heads,
                      kMostKvHeads);
}

/// @param verb  name of the operation, for messages
inline Status check_write_stride(const char* verb, std::int64_t page_stride) {
  if (page_stride <= kMostWriteStride) return {};
  return Status::fail(StatusCode::unsupported, "%s: pages %lld bytes apart; supported are fewer than 2^32", verb,
                      static_cast<long long>(page_stride));
}

/// Whether kernels of this format read linear rows (plan/linear_rows.h).
inline bool is_linear_format(const TileSide& side) { return side.is_bits() && side.table_bits == 0 && !side.segments; }

inline bool same_format(const TileSide& a, const TileSide& b) {
  return a.head_dim == b.head_dim && a.bits == b.bits && a.numbers == b.numbers && a.row_words == b.row_words &&
         a.index_bytes == b.index_bytes &&
         (a.exact() || (a.group_size == b.group_size && a.number_size == b.number_size &&
                        a.integer_zero == b.integer_zero && a.row_words == b.row_words &&
                        a.index_bytes == b.index_bytes && a.table_bits == b.table_bits && a.segments == b.segments));
}

inline bool same_format(const CacheFormat& a, const CacheFormat& b) {
  return same_format(a.k, b.k) && same_format(a.v, b.v) && a.k_bfloat == b.k_bfloat && a.v_bfloat == b.v_bfloat;
}

/// Pages have 16, 32, 64 or 128 tokens.
/// @param page_shift  log2 of page_size
inline Status check_page_shift(const char* verb, int page_shift) {
  if (page_shift >= 4 && page_shift <= 7) return {};
  return Status::fail(StatusCode::unsupported, "%s: pages of 2^%d tokens; supported are 16, 32, 64 and 128", verb,
                      page_shift);
}

/// Checks one pool of exact rows. @param name  "sinks", "rings"  @param tokens  that a slot must hold
inline Status check_window_pool(const char* verb, const char* name, const void* rows, const WindowLayout& w, int tokens,
                                const TileSide& k, const TileSide& v, int num_kv_heads) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (w.num_kv_heads != num_kv_heads || !same_format(w.k, TileSide{k.head_dim, 16, 0, 0}) ||
      !same_format(w.v, TileSide{v.head_dim, 16, 0, 0}) || !same_format(w.coded_v, v))
    return Status::fail(kBad, "%s: the layout of %s is not that of the layer", verb, name);
  if (tokens == 0) return {};
  if (w.rows < tokens || w.rows % kTileTokens != 0)
    return Status::fail(kBad, "%s: %d rows of %s do not hold %d tokens in tiles of %d", verb, w.rows, name, tokens,
                        kTileTokens);
  if (!rows || !aligned_to_16(rows))
    return Status::fail(kBad, "%s: %s must not be null, aligned to 16 bytes", verb, name);
  return {};
}

/// Checks the tables that name a call's sequences.
inline Status check_sequences(const char* verb, const SequenceTables& s, const WindowRule& windows) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (s.batch < 0) return Status::fail(kBad, "%s: batch is %d, expected 0 or more", verb, s.batch);
  if (windows.sink_tokens < 0 || windows.recent_tokens < 0)
    return Status::fail(kBad, "%s: sink_tokens and recent_tokens must be 0 or more, found %d and %d", verb,
                        windows.sink_tokens, windows.recent_tokens);
  if (s.batch == 0) return {};
  if (!s.seq_lens || !s.page_table) return Status::fail(kBad, "%s: seq_lens and page_table must not be null", verb);
  if (s.page_table_stride < 1)
    return Status::fail(kBad, "%s: page_table_stride is %lld, expected 1 or more", verb,
                        static_cast<long long>(s.page_table_stride));
  if (windows.sink_tokens > 0 && !s.sink_slots)
    return Status::fail(kBad, "%s: %d sink tokens need sink_slots (-1 for a sequence without)", verb,
                        windows.sink_tokens);
  if (windows.recent_tokens > 0 && !s.ring_slots)
    return Status::fail(kBad, "%s: %d recent tokens need ring_slots (-1 for a sequence without)", verb,
                        windows.recent_tokens);
  const Status tables =
      check_numbers(verb, "seq_lens, page_table, page_indptr, sink_slots, ring_slots and exact_from",
                    {s.seq_lens, s.page_table, s.page_indptr, s.sink_slots, s.ring_slots, s.exact_from}, 4);
  return tables.ok() ? check_numbers(verb, "sequence_ids", {s.sequence_ids}, 8) : tables;
}

/// Checks a layer's cache and a call's sequences.
inline Status check_cache_view(const char* verb, const PagedCacheView& c, const TileSide& k, const TileSide& v) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (c.num_kv_heads < 1) return Status::fail(kBad, "%s: %d KV heads, expected 1 or more", verb, c.num_kv_heads);
  for (const Status& status : {check_kv_heads(verb, c.num_kv_heads), check_page_shift(verb, c.page_shift),
                               check_sequences(verb, c, c.windows)})
    if (!status.ok() || c.batch == 0) return status;
  const PageLayout layout{k, v, c.num_kv_heads, 1 << c.page_shift};
  if ((!c.pages && c.extents.num_pages > 0) || !aligned_to_16(c.pages) || c.page_stride % 16 != 0 ||
      c.page_stride < layout.page_bytes())
    return Status::fail(kBad, "%s: pages must be aligned to 16 bytes and at least %lld bytes apart, found %lld", verb,
                        static_cast<long long>(layout.page_bytes()), static_cast<long long>(c.page_stride));
  if (c.windows.sink_tokens + c.windows.recent_tokens == 0) return {};
  const Status sinks =
      check_window_pool(verb, "sinks", c.sinks, c.sink_layout, c.windows.sink_tokens, k, v, c.num_kv_heads);
  return sinks.ok()
             ? check_window_pool(verb, "rings", c.rings, c.ring_layout, c.windows.recent_tokens, k, v, c.num_kv_heads)
             : sinks;
}

/// Checks what kernels need to read rows with centroids.
inline Status check_centroids(const char* verb, const PagedCacheView& c, const TileSide& k, const TileSide& v) {
  for (const bool value : {false, true}) {
    const RowCode& code = value ? c.code_v : c.code_k;
    const int index_bytes = (value ? v : k).index_bytes, most = 1 << (8 * index_bytes);
    if (index_bytes == 0) continue;
    if (!code.rotated_centroids || !aligned_to_16(code.rotated_centroids))
      return Status::fail(StatusCode::invalid_argument,
                          "%s: %s: rows with centroids need `rotated_centroids`, aligned to 16 bytes", verb,
                          value ? "v" : "k");
    if (code.num_centroids < 1 || code.num_centroids > most)
      return Status::fail(StatusCode::invalid_argument, "%s: %s: %d centroids, expected 1 to %d", verb,
                          value ? "v" : "k", code.num_centroids, most);
  }
  return {};
}

/// Checks what generic kernels need to read rows of bit tiles and rows with centroids.
inline Status check_row_codes(const char* verb, const PagedCacheView& c, const TileSide& k, const TileSide& v) {
  for (const bool value : {false, true}) {
    const TileSide& side = value ? v : k;
    const RowCode& code = value ? c.code_v : c.code_k;
    if (side.is_bits() && !code.heads)
      return Status::fail(StatusCode::invalid_argument, "%s: %s: rows of bit tiles need `heads`", verb,
                          value ? "v" : "k");
  }
  return check_centroids(verb, c, k, v);
}

}  // namespace kvq
