#pragma once

#include <kvq/core/status.h>
#include <kvq/runtime/kernels/common/fault.h>
#include <kvq/runtime/kernels/common/ring_state.h>

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace kvq {

/// One layer's entries (pages, sink slots or rings) in its pool.
struct CopyLayer {
  std::byte* pool = nullptr;       ///< 16-byte aligned
  std::int64_t stride = 0;         ///< bytes from entry to entry
  std::int64_t bytes = 0;          ///< of an entry, a multiple of 16
  std::int64_t buffer_offset = 0;  ///< of the layer in an entry of a buffer
};

/// One call that copies entries of all layers, from pool to pool, or between pool and buffer.
struct CopyParams {
  int num_layers = 0;
  const CopyLayer* layers = nullptr;   ///< [L], on the device
  std::int64_t most_bytes = 0;         ///< of an entry of any layer
  std::int64_t buffer_bytes = 0;       ///< of an entry in a buffer: all layers, then the RingState of rings
  int count = 0;                       ///< N
  int num_entries = 0;                 ///< of the pool
  const std::int32_t* from = nullptr;  ///< [N] or null: the buffer
  const std::int32_t* to = nullptr;    ///< [N] or null: the buffer
  std::byte* buffer = nullptr;

  RingState* ring_states = nullptr;             ///< of rings, else null
  const std::uint64_t* sequence_ids = nullptr;  ///< [N] new owners of rings, or null

  FaultCode fault_code = FaultCode::page;  ///< of a number beyond the pool
  FaultRecord* faults = nullptr;           ///< null: not recorded
};

/// Checks the preconditions of a launch. Host only; reads no device memory.
Status check_copy(const CopyParams& params);
/// Loads the kernel onto the current device.
Status load_copy();
/// Enqueues the kernel; may be captured in a CUDA graph.
Status run_copy(const CopyParams& params, CUstream_st* stream);

}  // namespace kvq
