#pragma once

#include <kvq/core/status.h>
#include <kvq/plan/page_layout.h>
#include <kvq/runtime/kernels/common/format.h>

#include <cstdint>

/// Checks that several kernels share.
namespace kvq {

inline bool aligned_to_16(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

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

inline bool same_format(const TileSide& a, const TileSide& b) {
  return a.head_dim == b.head_dim && a.bits == b.bits && a.numbers == b.numbers &&
         (a.exact() || a.group_size == b.group_size);
}

inline bool same_format(const CacheFormat& a, const CacheFormat& b) {
  return same_format(a.k, b.k) && same_format(a.v, b.v) && a.k_bfloat == b.k_bfloat && a.v_bfloat == b.v_bfloat;
}

/// Is this the window layout of a layer with these sides?
inline bool windows_of(const WindowLayout& w, const TileSide& k, const TileSide& v, int num_kv_heads) {
  return w.num_kv_heads == num_kv_heads && same_format(w.k, TileSide{k.head_dim, 16, 0, 0}) &&
         same_format(w.v, TileSide{v.head_dim, 16, 0, 0}) && same_format(w.coded_v, v) && w.tiles() > 0 &&
         w.sink_rows % kTileTokens == 0 && w.ring_rows % kTileTokens == 0;
}

}  // namespace kvq
