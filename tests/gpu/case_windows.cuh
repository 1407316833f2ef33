#pragma once

#include "device_memory.h"

#include <kvq/runtime/kernels/common/page_view.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

/// Sinks and rings of caches with random contents.
namespace kvq::test {

/// Stores a number of a group of codes.
__device__ inline void put_group_number(std::byte* at, float x, const TileSide& side, bool bfloat) {
  if (side.number_size == 4)
    *reinterpret_cast<float*>(at) = x;
  else
    *reinterpret_cast<unsigned short*>(at) =
        bfloat ? __bfloat16_as_ushort(__float2bfloat16(x)) : __half_as_ushort(__float2half(x));
}

/// What a case's kernels write and check.
struct CaseWindows {
  std::byte *sinks = nullptr, *rings = nullptr;
  FaultRecord* faults = nullptr;

  /// The fault that kernels recorded, in words; empty if there is none.
  std::string fault() const {
    FaultRecord found;
    check(cudaMemcpy(&found, faults, sizeof found, cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (found.claimed == 0) return "";
    return "fault " + std::to_string(found.code) + " of sequence " + std::to_string(found.sequence) + ": " +
           std::to_string(found.value);
  }
};

/// Gives the sequences of a cache sink slots and rings in another order than theirs, some of them none, and sets the
/// extents of the pools. All rows are NaN. Which sequence has what follows from the seed: the first one has both and
/// exact_from 0.
/// @param lengths    the longest of each sequence
/// @param num_pages  of the pool
inline CaseWindows put_windows(Arena& arena, PagedCacheView& cache, const TileSide& k, const TileSide& v,
                               const std::vector<int>& lengths, int num_pages, unsigned seed) {
  const int batch = static_cast<int>(lengths.size()), slots = batch + 1;
  std::mt19937 random(seed * 31 + 7);
  std::vector<int> sink_slots, ring_slots, exact_from;
  std::vector<RingState> states(static_cast<std::size_t>(slots));
  std::vector<std::uint64_t> ids;
  for (int b = 0; b < batch; ++b) {
    const unsigned kind = b == 0 ? 0 : random() % 5;
    sink_slots.push_back(kind == 1 ? -1 : batch - 1 - b);
    ring_slots.push_back(kind == 2 ? -1 : batch - b);
    const int length = lengths[static_cast<std::size_t>(b)];
    exact_from.push_back(kind == 3 ? length : kind == 4 ? static_cast<int>(random() % (unsigned(length) + 1)) : 0);
    ids.push_back(1000 + static_cast<unsigned>(b));
    states[static_cast<std::size_t>(batch - b)].owner = ids.back();
  }
  cache.sink_slots = arena.put(sink_slots), cache.ring_slots = arena.put(ring_slots);
  cache.exact_from = arena.put(exact_from), cache.sequence_ids = arena.put(ids);
  cache.ring_states = arena.put(states);
  cache.extents = {std::max(1, num_pages), slots, slots};
  WindowLayout& sinks = cache.sink_layout;
  sinks = {cache.num_kv_heads, {k.head_dim, 16, k.head_dim, 0}, {v.head_dim, 16, v.head_dim, 0}, v};
  cache.ring_layout = sinks;
  sinks.rows = (cache.windows.sink_tokens + 15) / 16 * 16;
  if (cache.windows.recent_tokens > 0) cache.ring_layout.rows = (cache.windows.recent_tokens + 15) / 16 * 16 + 16;
  CaseWindows made;
  made.sinks = arena.take<std::byte>(static_cast<std::size_t>(sinks.slot_bytes() * slots), 0xFF);
  made.rings = arena.take<std::byte>(static_cast<std::size_t>(cache.ring_layout.slot_bytes() * slots), 0xFF);
  made.faults = arena.put(std::vector<FaultRecord>(1));
  cache.sinks = made.sinks, cache.rings = made.rings, cache.faults = made.faults;
  return made;
}

/// Which tokens of a sequence are exact.
__device__ inline SequenceTokens case_tokens(const PagedCacheView& c, int b) {
  return c.windows.tokens_of(c.seq_lens[b], c.exact_from ? c.exact_from[b] : 0, c.sink_slots && c.sink_slots[b] >= 0,
                             c.ring_slots && c.ring_slots[b] >= 0);
}

/// Byte of a channel of a position's exact row in its pool.
__device__ inline std::int64_t case_window_offset(const PagedCacheView& c, const SequenceTokens& tokens, int b,
                                                  int head, int position, int channel, bool value) {
  const bool sink = position < tokens.sink_end;
  const WindowLayout& w = sink ? c.sink_layout : c.ring_layout;
  const int row = w.row(position);
  return (sink ? c.sink_slots : c.ring_slots)[b] * w.slot_bytes() + head * w.head_bytes() +
         (value ? w.value_offset(row, channel) : w.key_offset(row, channel));
}

}  // namespace kvq::test
