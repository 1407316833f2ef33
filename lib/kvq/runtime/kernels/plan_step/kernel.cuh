#pragma once

#include <kvq/runtime/kernels/common/tiers.h>
#include <kvq/runtime/kernels/plan_step/params.h>
#include <kvq/runtime/kernels/common/constants.cuh>

/// One thread for each new token of the step. The same threads list the demotions: a sequence demotes at most as many
/// tokens as it appends, so the thread of its k-th new token lists its k-th demotion. Each block computes by itself how
/// many demotions the blocks before it list.
namespace kvq::plan_step {

constexpr int kThreads = 256, kWarps = kThreads / 32;

/// One sequence in the step: its new tokens and its demotions.
struct SequenceStep {
  int first_row = 0, new_tokens = 0, length = 0;
  PositionRange demoted;
};

__device__ __forceinline__ SequenceStep step_of(const PlanStepParams& p, const Tiers& tiers, int sequence) {
  SequenceStep step;
  step.first_row = p.token_indptr[sequence];
  step.new_tokens = p.token_indptr[sequence + 1] - step.first_row;
  step.length = p.seq_lens[sequence];
  step.demoted = tiers.demoted(step.length - step.new_tokens, step.length);
  return step;
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

__device__ __forceinline__ std::int64_t page_slot(const PlanStepParams& p, int sequence, int position) {
  const std::int64_t base = p.page_indptr ? p.page_indptr[sequence] : sequence * p.page_table_stride;
  const int in_page = position & ((1 << p.page_shift) - 1);
  return (std::int64_t{p.page_table[base + (position >> p.page_shift)]} << p.page_shift) + in_page;
}

__device__ __forceinline__ std::int64_t window_row(const PlanStepParams& p, int sequence, int position) {
  const WindowLayout& layout = p.window_layout;
  return std::int64_t{p.window_slots[sequence]} * layout.rows() + layout.row(position, p.sink_tokens);
}

/// Grid [ceil(max(T, M, 1) / kThreads)].
__global__ void __launch_bounds__(kThreads) plan_step_kernel(const __grid_constant__ PlanStepParams p) {
  __shared__ int sums[kWarps][3];
  const Tiers tiers{p.sink_tokens, p.recent_tokens};
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int first_row = static_cast<int>(blockIdx.x) * kThreads, row = first_row + thread;

  // 1. Number of demotions of the rows before this block's rows, and of all rows.
  int before = 0, total = 0;
  for (int b = thread; b < p.batch; b += kThreads) {
    const SequenceStep step = step_of(p, tiers, b);
    before += min(max(first_row - step.first_row, 0), step.demoted.count());
    total += min(max(p.num_tokens - step.first_row, 0), step.demoted.count());
  }

  // 2. The row's token.
  bool demotes = false;
  int sequence = -1;
  SequenceStep step;
  if (row < p.num_tokens) {
    std::int64_t slot = -1, window = -1;
    sequence = sequence_of(p, row);
    if (sequence >= 0) {
      step = step_of(p, tiers, sequence);
      const int index = row - step.first_row, position = step.length - step.new_tokens + index;
      if (index < step.new_tokens) {
        demotes = index < step.demoted.count();
        if (position >= 0 && !tiers.exact(position, step.length)) slot = page_slot(p, sequence, position);
        if (position >= 0 && tiers.enters_window(position, step.length, p.window_layout.ring_rows))
          window = window_row(p, sequence, position);
      }
    }
    p.slot_mapping[row] = slot;
    if (p.window_mapping) p.window_mapping[row] = window;
  }
  if (p.max_demotions == 0) return;

  // 3. The row's demotion, and the end of the list.
  const unsigned votes = __ballot_sync(kAll, demotes);
  before = __reduce_add_sync(kAll, before), total = __reduce_add_sync(kAll, total);
  if (lane == 0) sums[warp][0] = before, sums[warp][1] = total, sums[warp][2] = __popc(votes);
  __syncthreads();
  int entry = __popc(votes & ((1u << lane) - 1)), count = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    entry += sums[w][0] + (w < warp ? sums[w][2] : 0);
    count += sums[w][1];
  }
  if (demotes && entry < p.max_demotions) {
    const int position = step.demoted.begin + row - step.first_row;
    p.demote_from[entry] = window_row(p, sequence, position);
    p.demote_to[entry] = page_slot(p, sequence, position);
  }
  if (row >= count && row < p.max_demotions) p.demote_from[row] = p.demote_to[row] = -1;
  if (row == 0) *p.num_demotions = min(count, p.max_demotions);
}

}  // namespace kvq::plan_step
