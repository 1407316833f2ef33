#pragma once

#include <kvq/runtime.h>
#include <kvq/runtime/kernels/common/fault.h>
#include <kvq/runtime/kernels/common/ring_state.h>
#include <kvq/runtime/kernels/copy/params.h>

#include <cstddef>

namespace kvq::abi {

constexpr int kNumCopyKinds = 3;  ///< of kvq_copy_kind

/// What a cache keeps in the caller's device memory: offsets in bytes.
struct CacheMemory {
  std::size_t faults = 0, ring_states = 0, copies = 0, total = 0;
  CacheMemory(std::size_t num_layers, const kvq_cache_options& o)
      : ring_states(rounded(sizeof(FaultRecord))),
        copies(ring_states + rounded(static_cast<std::size_t>(o.num_ring_slots) * sizeof(RingState))),
        total(copies + rounded(kNumCopyKinds * num_layers * sizeof(CopyLayer))) {}

 private:
  static std::size_t rounded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }
};

}  // namespace kvq::abi
