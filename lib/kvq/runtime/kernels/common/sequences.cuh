#pragma once

#include <kvq/runtime/kernels/common/page_view.h>
#include <kvq/runtime/kernels/common/fault.cuh>

/// Sequences as kernels read them from the caller's tables. (Past the L1 cache, because decode reads them before its
/// own wait for the kernels before it.)
namespace kvq {

__device__ __forceinline__ int slot_of(const std::int32_t* slots, int sequence) {
  return slots ? __ldcg(slots + sequence) : -1;
}

__device__ __forceinline__ SequenceEntry load_entry(const SequenceTables& tables, int sequence) {
  SequenceEntry entry;
  entry.length = __ldcg(tables.seq_lens + sequence);
  entry.table_entries = tables.page_table_stride;
  if (tables.page_indptr) {
    const std::int64_t begin = __ldcg(tables.page_indptr + sequence), end = __ldcg(tables.page_indptr + sequence + 1);
    entry.table_entries = begin < 0 || begin > end || end > tables.page_table_stride ? -1 : end - begin;
  }
  entry.sink_slot = slot_of(tables.sink_slots, sequence), entry.ring_slot = slot_of(tables.ring_slots, sequence);
  entry.exact_from = tables.exact_from ? __ldcg(tables.exact_from + sequence) : 0;
  return entry;
}

__device__ __forceinline__ CheckedSequence load_sequence(const PagedCacheView& cache, int sequence) {
  return check_sequence(load_entry(cache, sequence), cache.windows, cache.extents, cache.page_shift);
}

/// What a sequence's ring says of itself, beside who should own it.
struct RingLook {
  int slot = -1;  ///< negative: there is none to look at
  int lost = 0;
  std::uint64_t owner = 0, expected_owner = 0;

  /// Does the ring hold the rows that readers of these tokens take?
  __device__ __forceinline__ Fault fault(const SequenceTokens& tokens) const {
    if (slot < 0 || !reads_ring(tokens)) return {};
    if (lost) return {FaultCode::rollback, slot};
    if (owner != expected_owner) return {FaultCode::foreign_ring, slot};
    return {};
  }
};
/// Loads only: the caller may use the result much later.
/// @param slot  the sequence's ring slot
__device__ __forceinline__ RingLook load_ring(const PagedCacheView& cache, int sequence, int slot) {
  RingLook ring;
  if (!cache.ring_states || !cache.ring_slots) return ring;
  if (cache.sequence_ids) ring.expected_owner = __ldcg(cache.sequence_ids + sequence);
  if (slot < 0 || slot >= cache.extents.num_ring_slots) return ring;
  ring.slot = slot;
  ring.lost = __ldcg(&cache.ring_states[slot].lost);
  ring.owner = cache.sequence_ids ? __ldcg(&cache.ring_states[slot].owner) : 0;
  return ring;
}
/// Does the sequence's ring hold the rows that its readers take?
__device__ __forceinline__ Fault ring_fault(const PagedCacheView& cache, const SequenceTokens& tokens, int sequence) {
  if (!reads_ring(tokens)) return {};
  return load_ring(cache, sequence, slot_of(cache.ring_slots, sequence)).fault(tokens);
}

/// load_sequence() and ring_fault() together, for kernels that do not mind one load after the other.
__device__ __forceinline__ CheckedSequence load_whole_sequence(const PagedCacheView& cache, int sequence) {
  CheckedSequence checked = load_sequence(cache, sequence);
  if (!checked.fault) checked.fault = ring_fault(cache, checked.tokens, sequence);
  if (checked.fault) checked.tokens = {};
  return checked;
}

/// First entry of a sequence's page table.
__device__ __forceinline__ const std::int32_t* table_of(const SequenceTables& tables, int sequence) {
  return tables.page_table +
         (tables.page_indptr ? __ldcg(tables.page_indptr + sequence) : sequence * tables.page_table_stride);
}

__device__ __forceinline__ bool is_page(const PagedCacheView& cache, int number) {
  return static_cast<unsigned>(number) < static_cast<unsigned>(cache.extents.num_pages);
}
/// Page number of a position, or -1 if it is not in the pool.
__device__ __forceinline__ int page_of(const PagedCacheView& cache, const std::int32_t* table, int position) {
  const int page = __ldcg(table + (position >> cache.page_shift));
  return is_page(cache, page) ? page : -1;
}

/// First byte of the K and V tiles of one head that hold a position's exact row.
/// @param is_sink  the row is in the sink slot, else in the ring
/// @param row      result: of the slot
__device__ __forceinline__ const std::byte* exact_tiles(const PagedCacheView& cache, bool is_sink, int sequence,
                                                        int head, int position, int& row) {
  const WindowLayout& layout = is_sink ? cache.sink_layout : cache.ring_layout;
  const int slot = __ldcg((is_sink ? cache.sink_slots : cache.ring_slots) + sequence);
  row = layout.row(position);
  return (is_sink ? cache.sinks : cache.rings) + slot * layout.slot_bytes() + head * layout.head_bytes() +
         row / kTileTokens * layout.tile_bytes();
}

}  // namespace kvq
