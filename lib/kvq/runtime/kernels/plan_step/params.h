#pragma once

#include <kvq/plan/page_layout.h>
#include <kvq/runtime/kernels/common/sequences.h>

#include <cstdint>

namespace kvq {

/// One step of a batch: where its new tokens go, the same for all layers that share page tables and slots. Lengths are
/// read on the device, so that a captured graph can be replayed with other lengths.
struct PlanStepParams : SequenceTables {  ///< lengths: after the step
  int num_tokens = 0;  ///< T rows of the step's keys and values; rows behind the last sequence's are not written
  const std::int32_t* token_indptr = nullptr;  ///< [B + 1] ascending: rows of each sequence's new tokens, its last ones

  int page_shift = 6;  ///< log2 of page_size
  WindowRule windows = {};
  CacheExtents extents = {};
  int sink_rows = 0, ring_rows = 0;  ///< of a slot
  int max_rollback = 0;              ///< most tokens that are taken back at once; not read on the device
  RingState* ring_states = nullptr;  ///< [num_ring_slots], or null: not kept
  FaultRecord* faults = nullptr;     ///< null: not recorded

  // results
  std::int64_t* slot_mapping = nullptr;    ///< [T] page * page_size + slot of each token, or -1
  std::int64_t* window_mapping = nullptr;  ///< [T] row in the windows as ring_state.h says; null without windows
};

}  // namespace kvq
