#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/common/sequences.cuh>

/// Passes (schedule.h) as kernels read them from the caller's tables.
namespace kvq::decode {

__device__ __forceinline__ int sequence_of(const DecodeKernelParams& p, int pass) {
  return p.passes.count == 1 ? pass : pass / p.passes.count;
}

/// New tokens of a sequence: rows of q and out.
struct NewTokens {
  int first_row, count;
};
__device__ __forceinline__ NewTokens new_tokens_of(const DecodeParams& p, int sequence) {
  if (!p.q_indptr) return {sequence, 1};
  const int begin = __ldcg(p.q_indptr + sequence);
  return {begin, __ldcg(p.q_indptr + sequence + 1) - begin};
}

/// One pass: a sequence, and some of its new tokens or query heads.
struct Pass {
  int sequence;
  TileQueries queries;  ///< none if `checked` has a fault
  int first_row;        ///< of q and out: that of the first query
  CheckedSequence checked;
};
/// @param pass   number among all passes
/// @param entry  of its sequence
__device__ __forceinline__ Pass check_pass(const DecodeKernelParams& p, int pass, const SequenceEntry& entry) {
  const int sequence = sequence_of(p, pass);
  Pass loaded{sequence, {}, sequence, check_sequence(entry, p.cache.windows, p.cache.extents, p.cache.page_shift)};
  if (!p.q_indptr) return loaded;
  const NewTokens tokens = new_tokens_of(p, sequence);
  const std::int64_t end = std::int64_t{tokens.first_row} + tokens.count;
  const bool rows_exist = tokens.first_row >= 0 && tokens.count >= 0 && end <= p.num_tokens;
  loaded.queries = queries_of_pass(p.passes, rows_exist ? tokens.count : 0, pass - sequence * p.passes.count);
  loaded.first_row = tokens.first_row + loaded.queries.first;
  if (loaded.checked.fault) return loaded;
  if (!rows_exist || tokens.count > loaded.checked.tokens.length)
    loaded.checked = {{}, {FaultCode::new_tokens, end}};
  else if (tokens.count > p.max_new_tokens)
    loaded.checked = {{}, {FaultCode::plan, tokens.count}};
  return loaded;
}

__device__ __forceinline__ Pass load_pass(const DecodeKernelParams& p, int pass) {
  return check_pass(p, pass, load_entry(p.cache, sequence_of(p, pass)));
}

/// @param length  tokens of the pass's sequence; 0 with a fault
__device__ __forceinline__ SeenRanges seen_by_pass(const DecodeKernelParams& p, int pass, int length) {
  const int sequence = sequence_of(p, pass);
  PositionRange range = {0, length};
  if (p.first) range.begin = max(0, __ldcg(p.first + sequence));
  if (p.last) range.end = min(length, __ldcg(p.last + sequence));
  if (length == 0) return {};
  const TileQueries queries =
      p.q_indptr ? queries_of_pass(p.passes, new_tokens_of(p, sequence).count, pass - sequence * p.passes.count)
                 : TileQueries{};
  return seen_by(length, queries, p.token_masks != nullptr, p.sliding_window, range);
}

/// A row of a work tile.
struct Row {
  int query;  ///< number of its new token in the pass
  int head;   ///< query head, in its KV head

  /// False for padding. @param count  new tokens of the pass
  __device__ __forceinline__ bool exists(const DecodeKernelParams& p, int count) const {
    return query < count && head < p.heads_per_kv_head;
  }
};
/// @param pass  number among all passes
__device__ __forceinline__ Row row_of(const DecodeKernelParams& p, int pass, int row) {
  const int heads = p.passes.heads, first_head = p.passes.head_parts > 1 ? pass % p.passes.head_parts * heads : 0;
  if (row < heads) return {0, first_head + row};
  return {row / heads, first_head + row % heads};
}

/// What the rows of a new token see, where rows differ. A padding row sees what any does.
/// @param of_pass  number of the new token in the pass
__device__ __forceinline__ RowSight sight_of(const DecodeKernelParams& p, const Pass& pass, int of_pass) {
  const int length = pass.checked.tokens.length, query = pass.queries.first + of_pass,
            new_begin = length - pass.queries.new_tokens, position = new_begin + query;
  RowSight sight{p.sliding_window > 0 ? max(0, position + 1 - p.sliding_window) : 0, new_begin, ~0u};
  if (of_pass >= pass.queries.count) return sight;
  sight.mask = p.token_masks ? __ldcg(p.token_masks + pass.first_row + of_pass) : (2u << query) - 1;
  return sight;
}

}  // namespace kvq::decode
