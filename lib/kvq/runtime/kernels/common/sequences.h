#pragma once

#include <kvq/runtime/kernels/common/fault.h>
#include <kvq/runtime/kernels/common/ring_state.h>
#include <kvq/runtime/kernels/common/sequence_tokens.h>

#include <cstdint>
#include <limits>

namespace kvq {

/// The sequences of a call: arrays on the device that all verbs and all layers share.
struct SequenceTables {
  int batch = 0;                                ///< B
  const std::int32_t* seq_lens = nullptr;       ///< [B] tokens of each sequence
  const std::int32_t* page_table = nullptr;     ///< [B, max_pages], or one list if page_indptr is given
  const std::int32_t* page_indptr = nullptr;    ///< [B + 1] or null
  std::int64_t page_table_stride = 0;           ///< entries of a row of the table, or of the whole list
  const std::int32_t* sink_slots = nullptr;     ///< [B] negative: none; null: no sequence has one
  const std::int32_t* ring_slots = nullptr;     ///< likewise
  const std::int32_t* exact_from = nullptr;     ///< [B] first position whose exact row the ring holds; null: 0
  const std::uint64_t* sequence_ids = nullptr;  ///< [B] owners of rings, or null: 0
};

/// Sizes of a cache's pools, equal in all layers.
struct CacheExtents {
  static constexpr int kUnchecked = std::numeric_limits<int>::max();
  int num_pages = kUnchecked, num_sink_slots = kUnchecked, num_ring_slots = kUnchecked;
};

/// What the tables say about one sequence.
struct SequenceEntry {
  int length = 0;
  std::int64_t table_entries = 0;      ///< entries of its page table; -1: they lie beyond the list
  int sink_slot = -1, ring_slot = -1;  ///< negative: none
  int exact_from = 0;
};

/// A sequence that kernels may visit. With a fault it has no tokens.
struct CheckedSequence {
  SequenceTokens tokens = {};
  Fault fault = {};
};

KVQ_HD inline CheckedSequence check_sequence(const SequenceEntry& entry, const WindowRule& windows,
                                             const CacheExtents& extents, int page_shift) {
  if (entry.length < 0 || entry.length > entry.table_entries << page_shift)
    return {{}, {FaultCode::length, entry.length}};
  if (entry.sink_slot >= extents.num_sink_slots) return {{}, {FaultCode::sink_slot, entry.sink_slot}};
  if (entry.ring_slot >= extents.num_ring_slots) return {{}, {FaultCode::ring_slot, entry.ring_slot}};
  return {windows.tokens_of(entry.length, entry.exact_from, entry.sink_slot >= 0, entry.ring_slot >= 0), {}};
}

}  // namespace kvq
