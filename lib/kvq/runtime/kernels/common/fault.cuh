#pragma once

#include <kvq/runtime/kernels/common/fault.h>

#include <cuda_runtime.h>

namespace kvq {

/// Records a fault, unless another one was recorded before.
/// @param record    null: nothing is recorded
/// @param sequence  index in the batch, or -1
/// @param layer     of the whole model, or -1
__device__ __noinline__ inline void record_fault(FaultRecord* record, Fault fault, int sequence, int layer) {
  if (!record || atomicCAS(&record->claimed, 0, 1) != 0) return;
  record->sequence = sequence, record->layer = layer, record->value = fault.value;
  __threadfence();
  atomicExch(&record->code, static_cast<std::int32_t>(fault.code));
}

}  // namespace kvq
