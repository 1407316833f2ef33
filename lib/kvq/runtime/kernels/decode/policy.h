#pragma once

namespace kvq {

/// In how many rounds the chunk queue is split (schedule.h). Later rounds are shorter: they even out blocks that
/// are faster than others.
struct DecodeRounds {
  int most = 4;                ///< of any queue
  int long_rounds = 3;         ///< of a long queue; a very long one has `most`, a short one has one
  int long_queue = 128;        ///< KV chunks for each block from which on a queue is long...
  int very_long_queue = 1024;  ///< ...or very long: shorter last splits would not be worth their partial results
  int ends[3] = {56, 61, 63};  ///< where the rounds but the last end, in parts of the queue
  int parts = 64;              ///< of the queue, which `ends` counts
};
/// The same for all policies.
inline constexpr DecodeRounds kDecodeRounds = {};

/// What was found by measuring, for kernels of one architecture. A new architecture is one more function below, which
/// decode_policy() chooses.
struct DecodePolicy {
  int multiprocessor_blocks = 0;  ///< decode blocks that a multiprocessor holds at once
  int registers = 0;              ///< of a thread of the decode kernel: so few that all these blocks fit
  int rotate_registers = 0;       ///< of a thread of the queries and of the combine kernel (see displaced_blocks)
  int ring_bytes = 0;             ///< of all stages of a block, at most; formats with large stages differ
  int least_stages = 2, most_stages = 4;  ///< of a consumer warp
  int query_buffers = 0;                  ///< work tiles that a block holds the queries and partial results of

  int large_stages = 7, large_query_buffers = 3;  ///< of formats with large stages

  /// Loads of keys and values need not wait for the queries kernel. But if all of them were issued first, the loads of
  /// the queries would queue behind them, which costs more than it gains for short splits. So the block's first load
  /// issues 1 / first_load_divisor of its first work tile's stages, least_first_load at least, before the queries.
  int first_load_divisor = 5, least_first_load = 4;
  /// Lanes that issue copies of their stages at once, because one lane that issues one stage after the other does not
  /// keep up with the memory.
  int loads_at_once = 4;

  int query_blocks = 1, combine_blocks = 2;  ///< of the other two kernels, for each multiprocessor
  /// Decode blocks that do not fit beside a block of the queries kernel, so they start only when it has ended. In all
  /// of a multiprocessor there are registers for one of them, but each of its four partitions has too few for a warp
  /// more.
  int displaced_blocks = 2;
  int most_idle_divisor = 16;  ///< 1 / most_idle_divisor of the decode blocks, at most, stay idle for even splits
  /// Partial results of a row that a warp of the combine kernel loads at once. 17, which would be enough for almost all
  /// work tiles, were slower.
  int combine_batch = 0;
  int poll_nanoseconds = 40;  ///< between two looks of the combine kernel at a completion counter
};

/// Hopper (9.0). All other architectures are compiled with these constants, too.
constexpr DecodePolicy hopper_decode_policy(int head_dim, int rows, bool linear, bool wide, bool centroids) {
  DecodePolicy policy;
  if (head_dim <= 128) {
    policy.multiprocessor_blocks = 3, policy.registers = 120, policy.rotate_registers = 104;
    policy.ring_bytes = 55296;  // formats with large stages: 7 x 9216 at most
    policy.query_buffers = 4, policy.combine_batch = 9;
    if (rows > 4) policy.registers = 128, policy.query_buffers = 2;  // queries of many rows take more shared memory
    if (linear) policy.query_buffers = 3;  // blocks have sums of exact tokens in shared memory
    if (rows == 16 || wide || centroids) policy.multiprocessor_blocks = 2, policy.registers = 168;
    // Blocks have masses of centroids in shared memory, and with each query its scores of centroids.
    if (centroids) policy.large_query_buffers = 2;
  } else {
    policy.multiprocessor_blocks = 2, policy.registers = 168, policy.rotate_registers = 144;
    policy.ring_bytes = 65536;
    policy.query_buffers = 3, policy.combine_batch = 6;
  }
  return policy;
}

/// @param rows    of a work tile: 4, 8 or 16
/// @param linear  of kernels for linear rows
/// @param wide    of kernels for bit tiles: two blocks have the registers for sums and queries of so many bits
/// (DecodeTraits::kWide)
/// @param centroids  of kernels for rows with centroids
constexpr DecodePolicy decode_policy(int head_dim, int rows, bool linear = false, bool wide = false,
                                     bool centroids = false) {
  return hopper_decode_policy(head_dim, rows, linear, wide, centroids);
}

}  // namespace kvq
