#pragma once

#include <kvq/device/host_device.h>
#include <kvq/runtime/kernels/common/sequence_tokens.h>
#include <kvq/runtime/kernels/decode/policy.h>

#include <cstdint>
#include <span>
#include <vector>

/// Which block attends to which tokens: stream-K. Each (pass, KV head) is a work tile; a pass is a sequence, or as many
/// of its new tokens or query heads as one work tile has rows for (DecodePasses). Its tokens are cut into KV
/// chunks of similar bytes, one for each stage: first the quantized tokens, then the exact (bfloat16) ones. (A coded
/// chunk may have up to 2.25 times the bytes of an exact one, see DecodeTraits; splits count both as one. A work tile
/// of a coded format has few exact chunks.) The chunks of all work tiles lie end to end in one queue, the chunk queue,
/// pass by pass, head by head. The queue is cut into equal splits, one for each block. Where it is cut depends
/// on lengths that are read on the device, so that a captured graph stays right while sequences grow. Equal splits do
/// not take equal times: the oldest block of a multiprocessor is served first, and some multiprocessors are nearer to
/// memory. So on a long queue the equal splits leave a rest, which blocks claim in ever smaller splits from an atomic
/// work counter as they finish. (More than a few such splits cost more than they gain: each is one more work tile to
/// begin and to end.) On a short queue, blocks that would start late stay idle (make_decode_grids()).
///
/// This header has the arithmetic, which the kernels (schedule.cuh) and the host share. It needs no CUDA.
namespace kvq {

/// How the new tokens and query heads of a sequence are divided into passes. Each (new token, query head of a KV head)
/// is a row of a work tile, which has at most DecodeKernelShape::heads rows. A pass has all query heads of a KV head if
/// they fit, else one new token and some of its heads; the next pass has the next heads.
struct DecodePasses {
  int tokens = 1;      ///< new tokens of a pass, at most
  int count = 1;       ///< passes of a sequence
  int heads = 1;       ///< query heads of a KV head in a pass, at most
  int head_parts = 1;  ///< passes that the heads of a new token are divided into
};
constexpr DecodePasses make_decode_passes(int max_rows, int heads_per_kv_head, int max_new_tokens) {
  const int fit = max_rows / heads_per_kv_head,
            tokens = fit < 1                ? 1
                     : fit < max_new_tokens ? fit
                                            : max_new_tokens,
            heads = fit < 1 ? max_rows : heads_per_kv_head, parts = (heads_per_kv_head + heads - 1) / heads;
  return {tokens, (max_new_tokens + tokens - 1) / tokens * parts, heads, parts};
}

namespace decode {

/// Positions that the rows of a work tile see.
struct SeenRanges {
  PositionRange any;  ///< those outside are hidden from all rows
  PositionRange all;  ///< part of `any`: those inside are seen by all rows, as far as this is known without the masks
};

/// The queries of a work tile: `count` of the new tokens, from `first` on.
struct TileQueries {
  int new_tokens = 1, first = 0, count = 1;
};
/// @param pass  of the sequence
KVQ_HD constexpr TileQueries queries_of_pass(const DecodePasses& passes, int new_tokens, int pass) {
  if (passes.head_parts > 1) pass /= passes.head_parts;
  const int first = pass * passes.tokens, rest = new_tokens - first;
  return {new_tokens, first, rest < 0 ? 0 : rest < passes.tokens ? rest : passes.tokens};
}

/// @param masked          token_masks decide which new tokens a query sees
/// @param sliding_window  tokens that a query sees, itself included; 0 = all
/// @param range           what the caller lets all queries see
KVQ_HD inline SeenRanges seen_by(int length, const TileQueries& queries, bool masked, int sliding_window,
                                 const PositionRange& range) {
  if (queries.count == 0) return {};
  const int new_begin = length - queries.new_tokens, position = new_begin + queries.first,
            last = position + queries.count - 1;
  const auto begin_of = [&](int query) { return sliding_window > 0 ? larger(0, query + 1 - sliding_window) : 0; };
  return {{larger(range.begin, begin_of(position)), smaller(range.end, masked ? length : last + 1)},
          {larger(range.begin, begin_of(last)), smaller(range.end, masked ? new_begin : position + 1)}};
}

/// Which positions one row sees, of those that any row sees.
struct RowSight {
  int begin = 0;           ///< first position
  int new_begin = 0;       ///< position of the sequence's first new token
  std::uint32_t mask = 0;  ///< new tokens that the row sees
  KVQ_HD bool sees(int position) const {
    if (position < new_begin) return position >= begin;
    return position >= begin && position - new_begin < 32 && (mask >> (position - new_begin) & 1) != 0;
  }
};

/// KV chunks of one work tile; equal for all heads of a pass.
struct TileChunks {
  PositionRange seen_by_all;            ///< see SeenRanges
  int begin, end;                       ///< positions that any row sees
  int sink_end;                         ///< positions below it are exact sinks
  int coded_begin, coded_end;           ///< positions whose codes are read; from coded_end on tokens are exact
  int first_coded_chunk, coded_chunks;  ///< number of the first one, from position 0; how many
  int first_sink_chunk, sink_chunks;    ///< likewise, of eight exact tokens each
  int first_recent_chunk, recent_chunks;
  int count;  ///< of all kinds
};

/// Tokens of a KV chunk of either kind.
struct ChunkTokens {
  int coded = 0, exact = 0;
};

/// @tparam Tokens  ChunkTokens, or constants of the same names
template <typename Tokens>
KVQ_HD TileChunks chunks_of(const SequenceTokens& sequence, const SeenRanges& seen, const Tokens& tokens) {
  TileChunks c;
  c.seen_by_all = seen.all;
  c.begin = seen.any.begin, c.end = seen.any.end;
  c.sink_end = smaller(sequence.sink_end, c.end);
  c.coded_begin = larger(c.sink_end, c.begin);
  c.coded_end = larger(c.coded_begin, smaller(sequence.recent_begin, c.end));
  c.first_coded_chunk = c.coded_begin / tokens.coded;
  c.coded_chunks =
      c.coded_begin < c.coded_end ? (c.coded_end + tokens.coded - 1) / tokens.coded - c.first_coded_chunk : 0;
  c.first_sink_chunk = c.begin / tokens.exact;
  c.sink_chunks = c.begin < c.sink_end ? (c.sink_end + tokens.exact - 1) / tokens.exact - c.first_sink_chunk : 0;
  c.first_recent_chunk = c.coded_end / tokens.exact;
  c.recent_chunks = c.coded_end < c.end ? (c.end - 1) / tokens.exact + 1 - c.first_recent_chunk : 0;
  c.count = c.coded_chunks + c.sink_chunks + c.recent_chunks;
  return c;
}

/// How the queue is cut into splits. In round 0 each block has the split of its own number; the splits of the later
/// rounds, as many in each round, are claimed from the work counter.
struct Splits {
  static constexpr int kRounds = kDecodeRounds.most, kMostBlocks = 1 << 16;

  unsigned chunks = 0;  ///< of the queue
  int rounds = 1;
  int per_round = 0;  ///< splits of a round

  constexpr Splits() = default;
  /// @param blocks            of the decode kernel
  /// @param one_round_splits  number of splits of a queue of one round
  /// A queue of 2^32 chunks or more (10 TB of tokens, where shared pages count once for each sequence) is too long, and
  /// is treated as empty.
  KVQ_HD Splits(std::uint64_t queue_chunks, int blocks, int one_round_splits)
      : chunks(queue_chunks >> 32 ? 0 : static_cast<unsigned>(queue_chunks)),
        rounds(chunks < static_cast<unsigned>(kDecodeRounds.long_queue * blocks)        ? 1
               : chunks < static_cast<unsigned>(kDecodeRounds.very_long_queue * blocks) ? kDecodeRounds.long_rounds
                                                                                        : kDecodeRounds.most) {
    per_round = static_cast<int>(smaller(static_cast<unsigned>(rounds == 1 ? one_round_splits : blocks), chunks));
  }
  KVQ_HD constexpr int count() const { return rounds * per_round; }
  /// First chunk of a round.
  KVQ_HD constexpr unsigned round_begin(int round) const {
    constexpr DecodeRounds kPolicy = kDecodeRounds;
    if (round == 0) return 0;
    if (round == rounds) return chunks;
    int end = kPolicy.ends[0];
    for (int r = 1; r < kRounds - 1; ++r)
      if (round > r) end = kPolicy.ends[r];
    return static_cast<unsigned>(std::uint64_t{chunks} * static_cast<unsigned>(end) /
                                 static_cast<unsigned>(kPolicy.parts));
  }
  /// First chunk of a split, and one past its last.
  struct Range {
    unsigned begin, end;
  };
  KVQ_HD constexpr Range range_of(int split) const {
    int round = 0;
    for (int r = 1; r < kRounds; ++r)
      if (split >= r * per_round) round = r;
    const unsigned begin = round_begin(round), size = round_begin(round + 1) - begin;
    const auto in_round = static_cast<unsigned>(split - round * per_round);
    return {begin_in_round(begin, size, in_round), begin_in_round(begin, size, in_round + 1)};
  }

 private:
  KVQ_HD constexpr unsigned begin_in_round(unsigned begin, unsigned size, unsigned split) const {
    // size * split / per_round, without a division of 64 bits, which takes long. rest * split < 2^32 (kMostBlocks)
    const auto count = static_cast<unsigned>(per_round);
    const unsigned whole = size / count, rest = size - whole * count;
    return begin + whole * split + rest * split / count;
  }
};

/// Which partial result: the one that a split gives for a work tile. At most two work tiles of a split lie in other
/// splits as well: the one that the split begins in, and the one that it ends in; for these, the split has two
/// cut entries among the partial results. A work tile that is whole in one split has an entry of its own.
struct PartialId {
  int work_tile;  ///< pass * num_kv_heads + head
  int split;
  bool begins, ends;  ///< the split has the work tile's first chunk, its last one
};
/// Cut entries of a device, for work tiles that an edge of a split cuts. They lie before the entries of whole work
/// tiles.
KVQ_HD constexpr long long cut_partials(int blocks) { return 2LL * Splits::kRounds * blocks; }
KVQ_HD constexpr long long cut_partial(int split, bool begins) { return 2LL * split + begins; }
KVQ_HD constexpr long long whole_partial(int blocks, int work_tile) { return cut_partials(blocks) + work_tile; }
KVQ_HD constexpr long long partial_index(int blocks, const PartialId& id) {
  return id.begins && id.ends ? whole_partial(blocks, id.work_tile) : cut_partial(id.split, id.begins);
}

/// Completion counter of a work tile: one word, to which each stored partial result adds increment(id).
///
///    63                                 40 39                  20 19                 0
///   +-------------------------------------+----------------------+--------------------+
///   | one past last split - first split   | first split          | partial results    |
///   | (end - first), modulo 2^24          |                      | stored so far      |
///   +-------------------------------------+----------------------+--------------------+
///
/// The first partial result of a work tile adds the first split, the last one adds one past the last split: first and
/// last in the order of the queue; they arrive in any order. The work tile is complete when the difference equals the
/// number of stored partial results. Until both have arrived, the upper field is 0, or end (larger than the number of
/// stored partial results), or -first modulo 2^24 (0 or larger than kMost), so it does not equal that number,
/// which is 1 or more.
struct CompletionCounter {
  static constexpr int kMost = (1 << 20) - 1;                ///< of partial results, and of splits
  static constexpr unsigned long long kNone = 1ull << 20;    ///< a work tile without tokens; not a sum of increments
  static constexpr unsigned long long kFaulty = 2ull << 20;  ///< likewise, because its sequence has a fault
  unsigned long long bits = 0;
  KVQ_HD static constexpr unsigned long long increment(const PartialId& id) {
    const auto first = static_cast<unsigned long long>(id.begins ? id.split : 0);
    const auto end = static_cast<unsigned long long>(id.ends ? id.split + 1 : 0);
    return 1ull + (first << 20) + ((end - first) << 40);
  }
  KVQ_HD constexpr int first_split() const { return static_cast<int>(bits >> 20 & 0xFFFFF); }
  /// Of a complete work tile.
  KVQ_HD constexpr int partials() const { return static_cast<int>(bits >> 40); }
  KVQ_HD constexpr bool complete() const {
    return bits == kNone || bits == kFaulty || ((bits & 0xFFFFF) != 0 && (bits & 0xFFFFF) == bits >> 40);
  }
};

/// How work tiles are divided into units of the combine kernel. If work tiles are few, each row is a unit, so that all
/// blocks have work. If they are many, a unit has all rows of one pass, or of several. But the last passes are the
/// tail, where a unit has a quarter of a work tile's rows. This is for a queue of
/// several rounds: each of its rounds has the same number of splits, so work tiles in the short last round have many
/// partial results, and they are complete last. (The host does not know lengths, hence rounds, so each call with many
/// work tiles has a tail.) If the completion counter then shows few partial results, the work tile's first unit takes
/// all heads and the others are empty.
struct CombineSchedule {
  int unit_passes = 1, unit_rows = 1;   ///< of a unit before the tail: passes, rows of each; powers of two
  int tile_units = 1;                   ///< units of a work tile before the tail
  int units_before_tail = 0;            ///< units of a KV head before the tail
  int tail_begin = 0, tail_passes = 0;  ///< first pass of the tail, number of passes
  int tail_units = 0;                   ///< units of a work tile in the tail

  /// Units of a KV head.
  KVQ_HD constexpr int count() const { return units_before_tail + tail_passes * tail_units; }
};

}  // namespace decode

/// Sizes of one variant's kernels (DecodeTraits), for the host.
struct DecodeKernelShape {
  DecodePolicy policy = {};
  int heads = 0;           ///< rows of a work tile, padding included: query heads of a KV head, or multiples of them
  int consumer_warps = 0;  ///< of a block
  int stages = 0, stage_bytes = 0;  ///< of a block; of a stage
  decode::ChunkTokens chunk = {};
  int query_buffers = 0;
  int shared_bytes = 0;      ///< of a decode block
  int operand_bytes = 0;     ///< queries of one work tile
  int partial_bytes = 0;     ///< a partial result
  int combine_rows = 0;      ///< rows of any work tiles that a block of the combine kernel rotates at once
  int tail_rows = 0;         ///< rows of a unit of the tail
  int partials_at_once = 0;  ///< of a work tile, that a block of the combine kernel loads at once
};

/// What of a device decides how a call is scheduled.
struct DecodeDevice {
  int multiprocessors = 0;
  int blocks = 0;            ///< of the decode kernel that are resident at once
  bool overlapping = false;  ///< kernels may start before the stream's previous kernel has ended
};
/// A device that holds as many decode blocks as the policy says.
DecodeDevice assumed_device(const DecodeKernelShape& kernel, int multiprocessors);

/// The grids of a call's three kernels. Lengths do not change them, because a captured graph keeps them.
struct DecodeGrids {
  int query_blocks = 0, decode_blocks = 0, combine_blocks = 0;
  int one_round_splits = 0;  ///< splits of a queue of one round; the other decode blocks stay idle
  decode::CombineSchedule combine = {};
};
/// @param passes  of all sequences, 1 or more
/// @param rows    of a work tile, at most kernel.heads
DecodeGrids make_decode_grids(const DecodeKernelShape& kernel, const DecodeDevice& device, int passes, int rows,
                              int num_kv_heads);

/// One call, with the lengths that only its kernels read.
struct DecodeShape {
  int num_q_heads = 1, num_kv_heads = 1;
  WindowRule windows = {};
  int sliding_window = 0;                 ///< tokens that a query sees, itself included; 0 = all
  int new_tokens = 1;                     ///< of each sequence
  std::span<const std::int32_t> lengths;  ///< of each sequence; one or more sequences
};

/// What the kernels do with a call. The kernels find the same on the device, from the functions above.
struct DecodeSchedule {
  DecodeGrids grids = {};
  int num_kv_heads = 1;
  DecodePasses passes = {};
  int work_tiles = 0, empty_tiles = 0;  ///< all; without tokens
  std::uint64_t chunks = 0;             ///< KV chunks of the queue
  bool too_long = false;                ///< 2^32 chunks or more: results are NaN, and what follows is empty
  decode::Splits splits = {};
  int idle_blocks = 0;                      ///< decode blocks without a split
  int split_tiles = 0, most_splits = 0;     ///< work tiles of several splits; splits of a work tile
  std::int64_t partials = 0;                ///< partial results of all work tiles
  std::vector<std::uint32_t> first_chunks;  ///< [passes + 1] where each pass's first work tile begins; the queue's end

  /// KV chunks of each work tile of a pass.
  std::uint32_t tile_chunks(std::size_t pass) const {
    return (first_chunks[pass + 1] - first_chunks[pass]) / static_cast<std::uint32_t>(num_kv_heads);
  }
  /// Splits that have chunks of a work tile, from the first one to one past the last one; none if the work tile
  /// has no tokens.
  struct TileSplits {
    int begin, end;
    int count() const { return end - begin; }
  };
  TileSplits splits_of(int pass, int head) const;
  /// The split that contains chunk `chunk` of the queue.
  int split_of(std::uint32_t chunk) const;
};
DecodeSchedule make_decode_schedule(const DecodeKernelShape& kernel, const DecodeDevice& device,
                                    const DecodeShape& shape);

}  // namespace kvq
