#pragma once

#include <kvq/runtime/kernels/common/prefill_params.h>
#include <kvq/runtime/kernels/common/sequences.cuh>

namespace kvq {

/// The chunk (new tokens) of one sequence, and its prefix in the cache.
struct Chunk {
  int first_query = 0;         ///< index of its first token among the tokens of all chunks
  int queries = 0;             ///< tokens
  int prefix = 0;              ///< tokens of the sequence before the chunk
  SequenceTokens tokens = {};  ///< in the cache
  Fault fault = {};            ///< then the results of all queries are NaN

  __device__ __forceinline__ Chunk(const PrefillParams& p, int sequence) {
    const int begin = __ldcg(p.q_indptr + sequence), end = __ldcg(p.q_indptr + sequence + 1);
    first_query = min(max(0, begin), p.num_tokens);
    queries = max(0, min(max(0, end), p.num_tokens) - first_query);
    const CheckedSequence checked = load_whole_sequence(p.cache, sequence);
    tokens = checked.tokens, fault = checked.fault;
    prefix = p.prefix_lens ? __ldcg(p.prefix_lens + sequence) : tokens.length;
    if (fault) return;
    if (begin < 0 || begin > end || end > p.num_tokens)
      fault = {FaultCode::new_tokens, end};
    else if (prefix < 0 || prefix > tokens.length)
      fault = {FaultCode::prefix, prefix};
    else if (queries > p.max_queries || prefix > p.max_keys - queries)
      fault = {FaultCode::plan, std::int64_t{prefix} + queries};
  }
  __device__ __forceinline__ int keys() const { return prefix + queries; }
  /// Position of the first key that any query sees.
  __device__ __forceinline__ int first_key(int sliding_window) const {
    return sliding_window > 0 ? max(0, prefix + 1 - sliding_window) : 0;
  }
};

}  // namespace kvq
