#pragma once

#include <kvq/runtime/kernels/plan_step/params.h>
#include <kvq/runtime/kernels/common/constants.cuh>
#include <kvq/runtime/kernels/common/fault.cuh>
#include <kvq/runtime/kernels/common/sequences.cuh>

/// One thread for each row of the step's tokens. The thread of row b also keeps the ring of sequence b.
namespace kvq::plan_step {

constexpr int kThreads = 256;

/// One sequence in the step.
struct SequenceStep {
  int first_row = 0, new_tokens = 0;
  SequenceEntry entry = {};
  CheckedSequence checked = {};
  RingStep ring = {};
};

__device__ __forceinline__ SequenceStep step_of(const PlanStepParams& p, int sequence) {
  SequenceStep step;
  step.first_row = p.token_indptr[sequence];
  const std::int64_t new_tokens = std::int64_t{p.token_indptr[sequence + 1]} - step.first_row;
  step.entry = load_entry(p, sequence);
  step.checked = check_sequence(step.entry, p.windows, p.extents, p.page_shift);
  const bool fits = step.first_row >= 0 && new_tokens >= 0 && step.first_row + new_tokens <= p.num_tokens;
  if (!step.checked.fault && (!fits || new_tokens > step.entry.length))
    step.checked = {{}, {FaultCode::new_tokens, new_tokens}};
  if (!step.checked.fault) step.new_tokens = static_cast<int>(new_tokens);
  step.ring = {.owner = p.sequence_ids ? p.sequence_ids[sequence] : 0,
               .length_before = step.entry.length - step.new_tokens,
               .exact_from = step.entry.exact_from,
               .tokens = step.checked.tokens};
  return step;
}

/// The ring of a sequence, or null if it has none.
__device__ __forceinline__ RingState* ring_of(const PlanStepParams& p, const SequenceStep& step) {
  if (!p.ring_states || step.entry.ring_slot < 0 || step.checked.fault) return nullptr;
  return p.ring_states + step.entry.ring_slot;
}

__device__ __forceinline__ void keep_ring(const PlanStepParams& p, int sequence) {
  const SequenceStep step = step_of(p, sequence);
  if (step.checked.fault) record_fault(p.faults, step.checked.fault, sequence, -1);
  RingState* ring = ring_of(p, step);
  if (!ring) return;
  if (is_foreign(*ring, step.ring)) {
    record_fault(p.faults, {FaultCode::foreign_ring, step.entry.ring_slot}, sequence, -1);
    return;
  }
  *ring = ring_after(*ring, step.ring, p.ring_rows);
  if (ring->owner == step.ring.owner && ring->lost)
    record_fault(p.faults, {FaultCode::rollback, step.entry.ring_slot}, sequence, -1);
}

/// Last sequence whose rows begin at or before a row; -1 if there is none.
__device__ __forceinline__ int sequence_of(const PlanStepParams& p, int row) {
  int low = -1, high = p.batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (p.token_indptr[middle] <= row ? low : high) = middle;
  }
  return low;
}

/// The slot of a position: kNoPage without a page, kWrongPage for a number beyond the pool.
constexpr std::int64_t kNoPage = -1, kWrongPage = -2;
__device__ __forceinline__ std::int64_t page_slot(const PlanStepParams& p, int sequence, int position) {
  const int page = table_of(p, sequence)[position >> p.page_shift];
  if (page < 0) return kNoPage;
  if (page >= p.extents.num_pages) {
    record_fault(p.faults, {FaultCode::page, page}, sequence, -1);
    return kWrongPage;
  }
  return (std::int64_t{page} << p.page_shift) + (position & ((1 << p.page_shift) - 1));
}

/// Where the exact row of a new token goes. The ring holds more than the recent tokens, because taking tokens back
/// makes older tokens recent again.
__device__ __forceinline__ std::int64_t window_row(const PlanStepParams& p, const SequenceStep& step, int position) {
  if (position < step.checked.tokens.sink_end)
    return kSinkRow + std::int64_t{step.entry.sink_slot} * p.sink_rows + position;
  if (step.entry.ring_slot < 0 || position < step.entry.exact_from || position < step.entry.length - p.ring_rows)
    return -1;
  const RingState* ring = ring_of(p, step);
  if (ring && is_foreign(*ring, step.ring)) return -1;
  return std::int64_t{step.entry.ring_slot} * p.ring_rows + position % p.ring_rows;
}

/// Grid [ceil(max(T, B) / kThreads)].
__global__ void __launch_bounds__(kThreads) plan_step_kernel(const __grid_constant__ PlanStepParams p) {
  const int row = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (row < p.num_tokens) {
    std::int64_t slot = -1, window = -1;
    const int sequence = sequence_of(p, row);
    if (sequence >= 0) {
      const SequenceStep step = step_of(p, sequence);
      const int index = row - step.first_row, position = step.ring.length_before + index;
      if (!step.checked.fault && index < step.new_tokens) {
        slot = page_slot(p, sequence, position);
        if (p.window_mapping && slot != kWrongPage) window = window_row(p, step, position);
      }
    }
    p.slot_mapping[row] = slot < 0 ? -1 : slot;
    if (p.window_mapping) p.window_mapping[row] = window;
  }
  if (row < p.batch) keep_ring(p, row);
}

}  // namespace kvq::plan_step
