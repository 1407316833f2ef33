#pragma once

#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/runtime/kernels/prefill/variant.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>

#include <cstdint>
#include <optional>
#include <string>

/// What is measured, and how many bytes it has to move. No device is needed for this.
namespace kvq::bench {

enum class CaseRotation {
  none,
  hadamard,
  dense,
  scaled,    ///< Hadamard with scales of channels
  transform  ///< dense and not orthogonal
};
const char* to_string(CaseRotation rotation);

/// A cache of `batch` sequences of `context` tokens each.
struct CacheShape {
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;
  int num_kv_heads = 8, batch = 1, context = 1;
  int page_size = 64;
  int sink_tokens = 0, recent_tokens = 0;  ///< exact ones at both ends

  int num_pages() const { return (context + page_size - 1) / page_size; }  ///< of one sequence
  PageLayout pages() const { return {k, v, num_kv_heads, page_size}; }
  WindowLayout windows() const;
};

/// One new query token for each of `batch` sequences of `context` tokens.
struct DecodeCase {
  const DecodeVariant* variant = nullptr;
  int num_q_heads = 32, num_kv_heads = 8;
  int batch = 1, context = 1;
  int page_size = 64;
  int sink_tokens = 0, recent_tokens = 0;  ///< exact ones at both ends
  CaseRotation rotation = CaseRotation::none;
};

/// Bytes of the cache that one call has to read.
struct CacheBytes {
  std::int64_t coded = 0, exact = 0;
  std::int64_t total() const { return coded + exact; }
};
CacheShape cache_of(const DecodeCase& c);
CacheBytes bytes_of(const CacheShape& cache);
CacheBytes bytes_of(const DecodeCase& c);
/// Bytes of one token and KV head, K and V, in pages.
int token_bytes(const TileSide& k, const TileSide& v);
/// The bfloat16 kernel on as many tokens, all of them in pages; none if that variant is not built.
std::optional<DecodeCase> bf16_baseline(const DecodeCase& c);

/// A chunk of new queries for each of `batch` sequences, over `prefix` tokens in the cache and the chunk itself.
struct PrefillCase {
  const DequantizeVariant* rows = nullptr;
  const PrefillVariant* attention = nullptr;
  int num_q_heads = 32, num_kv_heads = 8;
  int batch = 1, prefix = 1, chunk = 1;
  int page_size = 64;
  int sink_tokens = 0, recent_tokens = 0;
  CaseRotation rotation = CaseRotation::none;
};
CacheShape cache_of(const PrefillCase& c);  ///< the prefix
/// Operations of both products: 2 D each for every query head, query and key that it sees.
double operations_of(const PrefillCase& c);

/// New tokens of K and V that are rotated, quantised and written into pages.
struct WriteCase {
  const WriteVariant* variant = nullptr;
  int num_kv_heads = 8, tokens = 1, page_size = 64;
  int order = 1;            ///< of the Hadamard blocks, both sides; 1 = none
  bool dense = false;       ///< a dense rotation of each KV head, both sides, in their place
  bool transform = false;   ///< not orthogonal: with scales of channels before the blocks, or a matrix with an inverse
  double clip_ratio = 1.0;  ///< of affine sides (packing.md, "Clip"); 1 = none
  ScaleRule symmetric_rule = ScaleRule::norm;  ///< of symmetric sides
};
ScaleRule rule_of(const WriteCase& c, const TileSide& side);
/// "dense", "dense, 0.96", "128", "128 scaled", "transform"
std::string rotation_name(const WriteCase& c);

/// Bytes that one call has to move.
struct RowBytes {
  std::int64_t read = 0, written = 0;
  std::int64_t total() const { return read + written; }
};
RowBytes bytes_of(const WriteCase& c);
/// The same where a kernel of its own rotates and writes rows that the next one reads.
RowBytes unfused_bytes_of(const WriteCase& c);

/// log2 of a page's tokens.
int page_shift(int page_size);

/// Copies of a call's data that are used in turn, so that none is in the L2 cache when its turn comes.
int num_sets(std::int64_t bytes);
/// Calls in a graph: whole rounds over the sets, about a millisecond's worth.
int num_calls(std::int64_t bytes);

}  // namespace kvq::bench
