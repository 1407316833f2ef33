#pragma once

#include <kvq/device/host_device.h>

#include <cstdint>

/// Faults of a caller's data that only the device can see. A kernel that finds one reads and writes nothing out of
/// bounds, makes the sequence's results NaN and records the first fault of the cache (kvq_fault_query).
namespace kvq {

/// The numbers are those of kvq_fault_code (runtime.h).
enum class FaultCode : std::int32_t {
  none = 0,
  length = 1,         ///< a length below 0, or beyond the sequence's page table
  page = 2,           ///< a page number beyond the pool
  sink_slot = 3,      ///< a sink slot beyond the pool
  ring_slot = 4,      ///< a ring slot beyond the pool
  foreign_ring = 5,   ///< the ring belongs to another sequence
  rollback = 6,       ///< more tokens were taken back than the ring holds
  new_tokens = 7,     ///< token_indptr or q_indptr descends, exceeds the call's tokens, or the sequence's length
  prefix = 8,         ///< prefix_lens above seq_lens
  plan = 9,           ///< a chunk or its keys beyond the plan's sizes
  slot_mapping = 10,  ///< a slot of the mapping beyond the pool
  window_row = 11,    ///< a row of the window mapping beyond the pools
  output_rows = 12,   ///< out_indptr has no room for the sequence's rows
};

/// A fault, or none.
struct Fault {
  FaultCode code = FaultCode::none;
  std::int64_t value = 0;  ///< what was found
  KVQ_HD constexpr explicit operator bool() const { return code != FaultCode::none; }
};

/// The first fault of a cache, in device memory.
struct FaultRecord {
  std::int32_t claimed = 0;  ///< 1: some thread writes the rest, or has
  std::int32_t code = 0;
  std::int32_t sequence = -1, layer = -1;  ///< index in the batch; layer of the whole model; -1: not known
  std::int64_t value = 0;
};

}  // namespace kvq
