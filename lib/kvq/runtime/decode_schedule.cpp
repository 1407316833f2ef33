#include <kvq/runtime/kernels/decode/schedule.h>
#include <kvq/runtime/kernels/decode/workspace.h>

#include <algorithm>

namespace kvq {

namespace {

int divide_up(int a, int b) { return (a + b - 1) / b; }

constexpr std::size_t kAlignment = 256;
std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

decode::CombineSchedule make_combine_schedule(const DecodeKernelShape& kernel, const DecodeDevice& device, int passes,
                                              int num_kv_heads, int rows) {
  // Few work tiles: one row in a unit. Many: as many passes as one product rotates.
  const int work_tiles = passes * num_kv_heads, fill = kernel.policy.combine_blocks * device.multiprocessors;
  const bool many = work_tiles >= device.multiprocessors;
  decode::CombineSchedule units;
  units.unit_rows = many ? kernel.heads : 1;
  while (2 * units.unit_passes * kernel.heads <= kernel.combine_rows && work_tiles / units.unit_passes > fill)
    units.unit_passes *= 2;
  units.tile_units = divide_up(rows, units.unit_rows);
  // A round has one split for each block, so at most this many work tiles have more than partials_at_once partial
  // results in the last round. (A few more may have many in the round before, but these are complete early enough.)
  const int long_tiles = many ? device.blocks / kernel.partials_at_once : 0;
  const int last_passes = divide_up(long_tiles, num_kv_heads);
  units.tail_begin = std::max(0, passes - last_passes) / units.unit_passes * units.unit_passes;
  units.tail_passes = passes - units.tail_begin;
  units.tail_units = divide_up(rows, kernel.tail_rows);
  units.units_before_tail = units.tail_begin / units.unit_passes * units.tile_units;
  return units;
}

/// Walks the work tiles and the splits side by side.
void count_partials(DecodeSchedule& s, int num_kv_heads) {
  int split = 0;  // the one that the next work tile begins in
  for (std::size_t b = 0; b + 1 < s.first_chunks.size(); ++b) {
    const std::uint32_t of_tile = s.tile_chunks(b);
    for (std::uint32_t head = 0; of_tile > 0 && head < static_cast<std::uint32_t>(num_kv_heads); ++head) {
      const std::uint64_t end = std::uint64_t{s.first_chunks[b]} + std::uint64_t{of_tile} * (head + 1);
      int count = 1;
      for (; s.splits.range_of(split).end < end; ++split) ++count;
      if (s.splits.range_of(split).end == end) ++split;
      s.split_tiles += count > 1 ? 1 : 0;
      s.most_splits = std::max(s.most_splits, count);
      s.partials += count;
    }
  }
}

}  // namespace

DecodeWorkspace make_decode_workspace(std::size_t work_tiles, std::size_t cut_partials, std::size_t partial_bytes,
                                      std::size_t operand_bytes) {
  DecodeWorkspace w;
  w.completions = w.work_counter + kAlignment;
  w.partials = w.completions + aligned(sizeof(unsigned long long) * work_tiles);
  w.operands = w.partials + (cut_partials + work_tiles) * partial_bytes;
  w.total = w.operands + work_tiles * operand_bytes;
  return w;
}

DecodeDevice assumed_device(const DecodeKernelShape& kernel, int multiprocessors) {
  return {multiprocessors, kernel.policy.multiprocessor_blocks * multiprocessors, true};
}

DecodeGrids make_decode_grids(const DecodeKernelShape& kernel, const DecodeDevice& device, int passes, int rows,
                              int num_kv_heads) {
  // Blocks of the queries and combine kernels: a multiple of the KV heads, so that a block needs one rotation. Blocks
  // of the queries kernel take registers that decode blocks wait for, hence one for each multiprocessor; blocks of the
  // combine kernel start only as decode blocks end, hence two.
  const auto blocks_for = [&](int units, int each) {
    const int fill = each * device.multiprocessors;
    return units <= fill ? units : std::max(1, fill / num_kv_heads) * num_kv_heads;
  };
  const int work_tiles = passes * num_kv_heads;
  DecodeGrids grids;
  grids.query_blocks = blocks_for(work_tiles, kernel.policy.query_blocks);
  grids.decode_blocks = device.blocks;
  grids.combine = make_combine_schedule(kernel, device, passes, num_kv_heads, rows);
  grids.combine_blocks = blocks_for(grids.combine.count() * num_kv_heads, kernel.policy.combine_blocks);
  // For a queue of one round a few blocks stay idle: (a) as many as start late, because they wait for a block of the
  // queries kernel to end, and (b) so many that splits end where work tiles of equal length end, because a block with
  // two work tiles has two beginnings and two ends.
  const int late = device.overlapping ? kernel.policy.displaced_blocks * grids.query_blocks : 0;
  grids.one_round_splits = device.blocks;
  for (const int blocks : {device.blocks, device.blocks - late}) {
    const int whole = blocks - blocks % work_tiles;
    if (device.blocks - whole <= device.blocks / kernel.policy.most_idle_divisor) grids.one_round_splits = whole;
  }
  return grids;
}

DecodeSchedule make_decode_schedule(const DecodeKernelShape& kernel, const DecodeDevice& device,
                                    const DecodeShape& shape) {
  DecodeSchedule s;
  const int batch = static_cast<int>(shape.lengths.size());
  s.num_kv_heads = shape.num_kv_heads;
  const int heads_each = shape.num_q_heads / shape.num_kv_heads;
  s.passes = make_decode_passes(kernel.heads, heads_each, shape.new_tokens);
  s.grids =
      make_decode_grids(kernel, device, batch * s.passes.count, s.passes.tokens * s.passes.heads, shape.num_kv_heads);
  s.work_tiles = batch * s.passes.count * shape.num_kv_heads;
  const auto heads = static_cast<std::uint64_t>(shape.num_kv_heads);
  std::vector<std::uint64_t> before = {0};
  for (const std::int32_t length : shape.lengths) {
    const SequenceTokens tokens = shape.windows.tokens_of(std::max(0, length), 0, true, true);
    const int new_tokens = std::min(shape.new_tokens, tokens.length);
    for (int pass = 0; pass < s.passes.count; ++pass) {
      const decode::TileQueries queries = decode::queries_of_pass(s.passes, new_tokens, pass);
      const decode::SeenRanges seen =
          decode::seen_by(tokens.length, queries, false, shape.sliding_window, {0, tokens.length});
      const int chunks = decode::chunks_of(tokens, seen, kernel.chunk).count;
      before.push_back(before.back() + heads * static_cast<std::uint64_t>(chunks));
      if (chunks == 0) s.empty_tiles += shape.num_kv_heads;
    }
  }
  s.chunks = before.back();
  s.too_long = s.chunks >> 32 != 0;
  if (s.too_long) return s;
  s.first_chunks.assign(before.begin(), before.end());
  s.splits = decode::Splits(s.chunks, device.blocks, s.grids.one_round_splits);
  s.idle_blocks = device.blocks - s.splits.per_round;
  count_partials(s, shape.num_kv_heads);
  return s;
}

int DecodeSchedule::split_of(std::uint32_t chunk) const {
  int first = 0, behind = splits.count();  // the split is in this range
  while (behind - first > 1) {
    const int middle = first + (behind - first) / 2;
    (splits.range_of(middle).begin <= chunk ? first : behind) = middle;
  }
  return first;
}

DecodeSchedule::TileSplits DecodeSchedule::splits_of(int pass, int head) const {
  const auto b = static_cast<std::size_t>(pass);
  const std::uint32_t of_tile = tile_chunks(b);
  if (of_tile == 0) return {0, 0};
  const std::uint32_t first = first_chunks[b] + static_cast<std::uint32_t>(head) * of_tile;
  return {split_of(first), split_of(first + of_tile - 1) + 1};
}

}  // namespace kvq
