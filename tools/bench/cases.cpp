#include "bench/cases.h"

#include <kvq/runtime/checks.h>

#include <fmt/format.h>

#include <algorithm>
#include <bit>

namespace kvq::bench {

namespace {

constexpr std::int64_t kLeastBytes = 300'000'000;  // several times the L2 cache of any GPU
constexpr std::int64_t kGraphBytes = 3'000'000'000;
constexpr std::int64_t kMostSets = 256, kMostCalls = 512;

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

const char* to_string(CaseRotation rotation) {
  switch (rotation) {
    case CaseRotation::none: return "none";
    case CaseRotation::hadamard: return "hadamard";
    case CaseRotation::dense: return "dense";
    case CaseRotation::scaled: return "scaled";
    case CaseRotation::transform: return "transform";
  }
  return "";
}

int token_bytes(const TileSide& k, const TileSide& v) { return (k.bytes() + v.bytes()) / kTileTokens; }

CacheShape cache_of(const DecodeCase& c) {
  const DecodeVariant& variant = *c.variant;
  return {
      .k = variant.k,
      .v = variant.v,
      .k_bfloat = variant.k_bfloat,
      .v_bfloat = variant.v_bfloat,
      .num_kv_heads = c.num_kv_heads,
      .batch = c.batch,
      .context = c.context,
      .new_tokens = c.new_tokens,
      .page_size = c.page_size,
      .exact = c.exact,
      .memory = variant.k.segments ? 0 : c.memory,  // beside keys of Block-GTQ, values have codebooks
  };
}

CacheBytes bytes_of(const CacheShape& c) {
  const std::int64_t exact = std::min(c.context, c.exact.sink_tokens + c.exact.recent_tokens),
                     rows = std::int64_t{c.batch} * c.num_kv_heads;
  return {rows * (c.context - exact) * token_bytes(c.k, c.v), rows * exact * 2 * (c.k.head_dim + c.v.head_dim)};
}

CacheBytes bytes_of(const DecodeCase& c) { return bytes_of(cache_of(c)); }

DecodeKey DecodeCase::key() const {
  return {
      .k = variant->k,
      .v = variant->v,
      .k_bfloat = variant->k_bfloat,
      .v_bfloat = variant->v_bfloat,
      .heads = num_q_heads / num_kv_heads,
      .bf16 = variant->bf16,
      .new_tokens = new_tokens,
  };
}

std::optional<DecodeCase> bf16_baseline(const DecodeCase& c) {
  const int dim = c.variant->k.head_dim;
  const TileSide exact{dim, 16, dim, 0};
  DecodeCase baseline = c;
  DecodeKey key = c.key();
  key.k = key.v = exact;
  baseline.variant = find_decode_variant(key);
  baseline.exact = {}, baseline.rotation = CaseRotation::none, baseline.unchecked = baseline.append = false;
  if (!baseline.variant) return std::nullopt;
  return baseline;
}

CacheShape cache_of(const PrefillCase& c) {
  const DequantizeVariant& rows = *c.rows;
  return {
      .k = rows.k,
      .v = rows.v,
      .k_bfloat = rows.k_bfloat,
      .v_bfloat = rows.v_bfloat,
      .num_kv_heads = c.num_kv_heads,
      .batch = c.batch,
      .context = c.prefix,
      .page_size = c.page_size,
      .exact = c.exact,
  };
}

double operations_of(const PrefillCase& c) {
  const double seen = static_cast<double>(c.chunk) * c.prefix + 0.5 * static_cast<double>(c.chunk) * (c.chunk + 1);
  return 4.0 * c.rows->k.head_dim * c.num_q_heads * c.batch * seen;
}

ScaleRule rule_of(const WriteCase& c, const TileSide& side) {
  return side.numbers == 2 ? ScaleRule::minmax : c.symmetric_rule;
}

std::string rotation_name(const WriteCase& c) {
  const std::string rotation =
      c.dense ? c.transform ? "transform" : "dense" : fmt::format("{}{}", c.order, c.transform ? " scaled" : "");
  if (is_linear_format(c.variant->k) || is_linear_format(c.variant->v))
    return fmt::format("{}, memory {}{}", rotation, c.memory,
                       c.workspace_tokens ? fmt::format(", room {}", *c.workspace_tokens) : "");
  if (c.variant->k.index_bytes > 0 && c.centroids != WriteCase{}.centroids)
    return fmt::format("{}, C = {}", rotation, c.centroids);
  return c.clip_ratio < 1.0 ? fmt::format("{}, {}", rotation, c.clip_ratio) : rotation;
}

const char* to_string(WriteStep step) { return step == WriteStep::prompt ? "prompt" : "decode"; }

ExactTokens exact_tokens(const WriteCase& c) {
  const bool has_ring = c.exact.recent_tokens > 0;
  if (c.step == WriteStep::decode) return {0, has_ring ? 0 : c.tokens};
  const int sink_end = std::min(c.tokens, c.exact.sink_tokens);
  return {sink_end, has_ring ? std::max(sink_end, c.tokens - c.windows().rings.rows) : c.tokens};
}

RowBytes bytes_of(const WriteCase& c) {
  const ExactTokens exact = exact_tokens(c);
  const std::int64_t rows = std::int64_t{c.tokens} * c.num_kv_heads,
                     exact_rows = std::int64_t{exact.sink_end + c.tokens - exact.ring_begin} * c.num_kv_heads;
  const TileSide &k = c.variant->k, &v = c.variant->v;
  const std::int64_t row = 2 * (k.head_dim + v.head_dim), mappings = c.has_windows() ? 2 : 1;
  return {rows * row + std::int64_t{c.tokens} * 8 * mappings, rows * token_bytes(k, v) + exact_rows * row};
}

RowBytes unfused_bytes_of(const WriteCase& c) {
  const std::int64_t rotated =
      std::int64_t{c.tokens} * c.num_kv_heads * 2 * (c.variant->k.head_dim + c.variant->v.head_dim);
  const RowBytes fused = bytes_of(c);
  return {fused.read + rotated, fused.written + rotated};
}

int page_shift(int page_size) { return std::countr_zero(static_cast<unsigned>(page_size)); }

int num_sets(std::int64_t bytes) {
  return static_cast<int>(std::clamp<std::int64_t>(divide_up(kLeastBytes, bytes), 1, kMostSets));
}

int num_calls(std::int64_t bytes) {
  const std::int64_t sets = num_sets(bytes);
  return static_cast<int>(sets * std::max<std::int64_t>(1, std::min(kGraphBytes / (sets * bytes), kMostCalls / sets)));
}

}  // namespace kvq::bench
