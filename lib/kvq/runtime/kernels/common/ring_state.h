#pragma once

#include <kvq/runtime/kernels/common/fault.h>
#include <kvq/runtime/kernels/common/sequence_tokens.h>

#include <cstdint>

namespace kvq {

/// Which rows a ring holds: one record of each ring slot, for all layers, in device memory. Steps keep it.
struct RingState {
  std::uint64_t owner = 0;     ///< sequence_ids of the step that took the ring over
  std::int32_t held_from = 0;  ///< positions from here on have their rows in the ring
  std::int32_t lost = 0;       ///< 1: the last step needs rows before held_from, since too many tokens were taken back
};

/// One sequence of a step.
struct RingStep {
  std::uint64_t owner = 0;
  int length_before = 0;  ///< tokens before the step
  int exact_from = 0;
  SequenceTokens tokens = {};  ///< after the step
};

/// Does a step take the ring over? It does if it has new tokens and no row of the ring was the sequence's yet.
KVQ_HD constexpr bool takes_over(const RingStep& step) {
  return step.length_before <= step.exact_from && step.length_before < step.tokens.length;
}

/// Does a reader of these tokens look at the ring?
KVQ_HD constexpr bool reads_ring(const SequenceTokens& tokens) { return tokens.recent_begin < tokens.length; }

/// Does the sequence need a ring that belongs to another one?
KVQ_HD constexpr bool is_foreign(const RingState& state, const RingStep& step) {
  return !takes_over(step) && reads_ring(step.tokens) && state.owner != step.owner;
}

/// The state after a step of a ring that is not foreign. The step writes the rows of the positions from length_before
/// on, and with them the rows that lie ring_rows before. A second application of the step changes nothing.
KVQ_HD inline RingState ring_after(const RingState& state, const RingStep& step, int ring_rows) {
  const bool fresh = takes_over(step);
  if (!fresh && state.owner != step.owner) return state;  // no token is read from the ring, and none was written
  const int kept = fresh ? step.exact_from : smaller(state.held_from, step.length_before);
  const int held_from = larger(kept, step.tokens.length - ring_rows);
  return {step.owner, held_from, reads_ring(step.tokens) && step.tokens.recent_begin < held_from};
}

/// Where the exact row of a step's token goes: -1 for nowhere, a row of the rings' pool, or kSinkRow plus a row of the
/// sinks' pool.
constexpr std::int64_t kSinkRow = std::int64_t{1} << 40;

}  // namespace kvq
