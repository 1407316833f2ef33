#pragma once

#include <kvq/plan/layer_pages.h>
#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/runtime/kernels/prefill/variant.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>

#include <cstdint>
#include <optional>
#include <string>

/// The cases that kvq-bench measures, and the bytes that each case moves. Needs no device.
namespace kvq::bench {

enum class CaseRotation {
  none,
  hadamard,
  dense,
  scaled,    ///< Hadamard with channel scales
  transform  ///< dense and not orthogonal
};
const char* to_string(CaseRotation rotation);

constexpr int kMaxRollback = 1;  ///< tokens that may be taken back at once; sizes the rings

/// A cache of `batch` sequences of `context` tokens each. Every token is coded in pages; those in the exact windows
/// have exact rows, too, which attention reads instead.
struct CacheShape {
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;
  int num_kv_heads = 8, batch = 1, context = 1;
  int new_tokens = 1;  ///< of each sequence: the last ones of its context
  int page_size = 64;
  Windows exact = {};  ///< tokens in the exact windows
  int memory = 3;      ///< of the trellises of linear rows; 0: rows of 2 bits have a codebook

  int num_pages() const { return (context + page_size - 1) / page_size; }  ///< of one sequence
  PageLayout pages() const { return {k, v, num_kv_heads, page_size}; }
  WindowLayouts windows() const { return window_layouts_of(pages(), exact, kMaxRollback); }
};

/// New query tokens, one or more, for each of `batch` sequences of `context` tokens, the new ones included.
struct DecodeCase {
  const DecodeVariant* variant = nullptr;
  int num_q_heads = 32, num_kv_heads = 8;
  int batch = 1, context = 1;
  int new_tokens = 1;  ///< of each sequence, each of which sees those before it
  int page_size = 64;
  Windows exact = {};
  CaseRotation rotation = CaseRotation::none;
  int memory = 3;          ///< of the trellises of linear rows
  bool unchecked = false;  ///< also timed without checks of page and slot numbers
  bool append = false;     ///< also timed behind the write of the new tokens

  DecodeKey key() const;
};

/// Bytes of the cache that one decode call reads: quantized rows and exact rows.
struct CacheBytes {
  std::int64_t coded = 0, exact = 0;
  std::int64_t total() const { return coded + exact; }
};
CacheShape cache_of(const DecodeCase& c);
CacheBytes bytes_of(const CacheShape& cache);
CacheBytes bytes_of(const DecodeCase& c);
/// Bytes of one token of one KV head in a page, key and value together.
int token_bytes(const TileSide& k, const TileSide& v);
/// The decode case of the bfloat16 variant with as many tokens, all of them in pages; none if that variant is not
/// built.
std::optional<DecodeCase> bf16_baseline(const DecodeCase& c);

/// A chunk of new queries for each of `batch` sequences; each query attends to `prefix` tokens in the cache and to the
/// chunk up to itself.
struct PrefillCase {
  const DequantizeVariant* rows = nullptr;
  const PrefillVariant* attention = nullptr;
  int num_q_heads = 32, num_kv_heads = 8;
  int batch = 1, prefix = 1, chunk = 1;
  int page_size = 64;
  Windows exact = {};
  CaseRotation rotation = CaseRotation::none;
};
CacheShape cache_of(const PrefillCase& c);  ///< the cache that holds the prefix
/// Floating-point operations of both matrix products: 4 D for each query head and each key that a query sees.
double operations_of(const PrefillCase& c);

/// Which tokens a write stores.
enum class WriteStep {
  prompt,  ///< the first tokens of one sequence
  decode   ///< the last token of each of as many sequences
};
const char* to_string(WriteStep step);

/// Keys and values of new tokens, which a write kernel rotates, quantizes and stores in pages. With windows it also
/// stores the exact rows of the first and the last tokens.
struct WriteCase {
  const WriteVariant* variant = nullptr;
  int num_kv_heads = 8, tokens = 1, page_size = 64;
  int order = 1;            ///< of the Hadamard blocks of both sides; 1: no Hadamard
  bool dense = false;       ///< both sides have a dense rotation for each KV head instead of Hadamard blocks
  bool transform = false;   ///< not orthogonal: channel scales before the Hadamard blocks, or a matrix with an inverse
  double clip_ratio = 1.0;  ///< clip ratio of affine sides (packing.md, "Clip"); 1: no clip
  ScaleRule symmetric_rule = ScaleRule::norm;  ///< scale rule of symmetric sides and of linear rows
  int memory = 3;                              ///< of linear rows' trellises
  int centroids = 256;                         ///< of a KV head, of sides with centroids
  std::optional<int> workspace_tokens = {};    ///< of trellis codes: tokens that the workspace has room for; or all
  WriteStep step = WriteStep::prompt;
  Windows exact = {};
  bool unchecked = false;  ///< also timed without checks of slot numbers

  bool has_windows() const { return exact != Windows{}; }
  PageLayout pages() const { return {variant->k, variant->v, num_kv_heads, page_size}; }
  WindowLayouts windows() const { return window_layouts_of(pages(), exact, kMaxRollback); }
};
ScaleRule rule_of(const WriteCase& c, const TileSide& side);
/// "dense", "dense, 0.96", "128", "128 scaled", "transform"
std::string rotation_name(const WriteCase& c);

/// Bytes that one write call moves.
struct RowBytes {
  std::int64_t read = 0, written = 0;
  std::int64_t total() const { return read + written; }
};
RowBytes bytes_of(const WriteCase& c);
/// Exact rows that a write stores: those of the tokens below sink_end in the sink slot, of the tokens from ring_begin
/// on in the ring.
struct ExactTokens {
  int sink_end = 0, ring_begin = 0;
};
ExactTokens exact_tokens(const WriteCase& c);
/// Bytes of a write in two kernels: the first kernel stores rotated rows, the second kernel reads them.
RowBytes unfused_bytes_of(const WriteCase& c);

/// log2 of `page_size`, which is a power of two.
int page_shift(int page_size);

/// How many copies of a call's data take turns, so that the L2 cache holds none of a call's input.
int num_sets(std::int64_t bytes);
/// Calls in one graph: whole rounds over the copies, about a millisecond of work.
int num_calls(std::int64_t bytes);

}  // namespace kvq::bench
