#include <kvq/runtime/kernels/decode/schedule.h>
#include <kvq/runtime/kernels/decode/variant.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

using namespace kvq;

namespace {

struct Case {
  int multiprocessors = 132, q_heads = 8, kv_heads = 8;
  WindowRule windows = {64, 256};
  int sliding_window = 0;
  std::vector<std::int32_t> lengths;
};

constexpr std::int32_t kLongest = 0x7FFFFFC0;  // 2^31 - 64

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int kv_heads : {1, 3, 8, 32})
    for (const int multiprocessors : {1, 7, 132}) {
      const auto add = [&](std::vector<std::int32_t> lengths, const WindowRule& windows, int sliding_window) {
        all.push_back({multiprocessors, 2 * kv_heads, kv_heads, windows, sliding_window, std::move(lengths)});
      };
      struct Rule {
        WindowRule windows;
        int sliding_window;
      };
      for (const auto& [windows, sliding] : {Rule{{64, 256}, 0}, Rule{{}, 0}, Rule{{16, 100}, 700}}) {
        add({0}, windows, sliding);
        add({1}, windows, sliding);
        add({0, 0, 1, 0}, windows, sliding);
        add({32768}, windows, sliding);
        add({1, 0, 17, 63, 64, 65, 300, 1021, 333, 2500}, windows, sliding);
        add(std::vector<std::int32_t>(64, 4096), windows, sliding);
        add(std::vector<std::int32_t>(300, 77), windows, sliding);
      }
      add({kLongest}, {64, 256}, 0);
      add({5, kLongest, 0, kLongest - 1}, {}, 0);
    }
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    Case c;
    c.multiprocessors = static_cast<int>(1 + random() % 140), c.kv_heads = static_cast<int>(1 + random() % 9);
    c.q_heads = c.kv_heads * static_cast<int>(1 + random() % 4);
    c.windows = {static_cast<int>(random() % 70), static_cast<int>(random() % 300)};
    c.sliding_window = random() % 3 ? 0 : static_cast<int>(1 + random() % 5000);
    for (std::size_t n = 1 + random() % 200; n > 0; --n)
      c.lengths.push_back(random() % 5 ? static_cast<std::int32_t>(random() % 40000) : 0);
    all.push_back(std::move(c));
  }
  return all;
}

DecodeSchedule schedule_of(const DecodeVariant& variant, const Case& c) {
  return make_decode_schedule(variant.shape, assumed_device(variant.shape, c.multiprocessors),
                              {c.q_heads, c.kv_heads, c.windows, c.sliding_window, 1, c.lengths});
}

const DecodeVariant& two_bits() {
  const TileSide side{128, 2, 128, 2};
  const DecodeVariant* variant = find_decode_variant({.k = side, .v = side, .heads = 4});
  REQUIRE(variant != nullptr);
  return *variant;
}

/// Adds to `held`, for each position in `range`, how many of the chunks hold it.
void add_chunks(std::vector<int>& held, int first_chunk, int chunks, int size, const PositionRange& range) {
  for (int i = first_chunk; i < first_chunk + chunks; ++i)
    for (int p = i * size; p < (i + 1) * size; ++p)
      if (range.contains(p)) ++held.at(static_cast<std::size_t>(p));
}

/// How many KV chunks of a work tile hold the codes of each position, and its exact row, by the positions that the
/// producer warp loads.
struct HeldTokens {
  std::vector<int> coded, exact;
};
HeldTokens held_tokens(const decode::TileChunks& c, int length, const decode::ChunkTokens& of) {
  const std::vector<int> none(static_cast<std::size_t>(length), 0);
  HeldTokens held{none, none};
  add_chunks(held.coded, c.first_coded_chunk, c.coded_chunks, of.coded, {c.coded_begin, c.coded_end});
  add_chunks(held.exact, c.first_sink_chunk, c.sink_chunks, of.exact, {c.begin, c.sink_end});
  add_chunks(held.exact, c.first_recent_chunk, c.recent_chunks, of.exact, {c.coded_end, c.end});
  return held;
}

decode::TileChunks chunks_of(const SequenceTokens& tokens, int sliding_window, const decode::ChunkTokens& of) {
  return decode::chunks_of(
      tokens, decode::seen_by(tokens.length, {}, false, sliding_window, PositionRange{0, tokens.length}), of);
}

/// Does query `query` of the sequence's new tokens see a position? By the words of runtime.h.
bool sees(int length, int new_tokens, int query, const std::uint32_t* masks, int sliding_window,
          const PositionRange& range, int position) {
  const int own = length - new_tokens + query, newest = position - (length - new_tokens);
  if (position >= length || !range.contains(position)) return false;
  if (sliding_window > 0 && position <= own - sliding_window) return false;
  return newest < 0 || !masks ? position <= own : (masks[query] >> newest & 1) != 0;
}

}  // namespace

TEST_CASE("Ranges of positions that any row of a pass sees, and that all do", "[runtime]") {
  std::mt19937 random(2);
  for (int i = 0; i < 20000; ++i) {
    const int length = static_cast<int>(random() % 60), new_tokens = std::min(length, static_cast<int>(random() % 17));
    const int sliding_window = random() % 2 ? static_cast<int>(1 + random() % 30) : 0;
    const bool masked = random() % 3 == 0, ranged = random() % 3 == 0;
    std::uint32_t masks[16];
    for (auto& mask : masks) mask = static_cast<std::uint32_t>(random());
    PositionRange range{0, length};
    if (ranged) range = {static_cast<int>(random() % 70), std::min(length, static_cast<int>(random() % 70))};
    const DecodePasses passes = make_decode_passes(16, 1 << random() % 7, std::max(1, static_cast<int>(random() % 17)));
    for (int pass = 0; pass < passes.count; ++pass) {
      const decode::TileQueries queries = decode::queries_of_pass(passes, new_tokens, pass);
      const decode::SeenRanges seen = decode::seen_by(length, queries, masked, sliding_window, range);
      bool right = true;
      for (int position = 0; position < 70; ++position) {
        bool by_all = true;
        for (int q = queries.first; q < queries.first + queries.count; ++q) {
          const bool is_seen = sees(length, new_tokens, q, masked ? masks : nullptr, sliding_window, range, position);
          right = right && (!is_seen || seen.any.contains(position));
          const int own = length - new_tokens + q;
          const decode::RowSight sight{sliding_window > 0 ? std::max(0, own + 1 - sliding_window) : 0,
                                       length - new_tokens, masked ? masks[q] : (2u << q) - 1};
          if (seen.any.contains(position)) right = right && sight.sees(position) == is_seen;
          by_all = by_all && is_seen;
        }
        if (queries.count > 0 && seen.all.contains(position)) right = right && by_all;
        if (queries.count == 0) right = right && !seen.any.contains(position);
      }
      if (!right) {
        CAPTURE(length, new_tokens, sliding_window, masked, range.begin, range.end, queries.first, queries.count);
        FAIL();
      }
    }
  }
}

TEST_CASE("Passes cover each query head of each new token of a sequence once", "[runtime]") {
  for (const int rows : {4, 8, 16})
    for (int heads = 1; heads <= 40; ++heads)
      for (int most = 1; most <= 16; ++most)
        for (int tokens = 0; tokens <= most; ++tokens) {
          CAPTURE(rows, heads, most, tokens);
          const DecodePasses passes = make_decode_passes(rows, heads, most);
          CHECK(passes.tokens * passes.heads <= rows);
          CHECK((passes.tokens == 1 || passes.head_parts == 1));
          std::vector<int> found(static_cast<std::size_t>(tokens * heads));
          for (int pass = 0; pass < passes.count; ++pass) {
            const decode::TileQueries queries = decode::queries_of_pass(passes, tokens, pass);
            const int first_head = pass % passes.head_parts * passes.heads;
            for (int token = queries.first; token < queries.first + queries.count; ++token)
              for (int head = first_head; head < std::min(heads, first_head + passes.heads); ++head)
                ++found[static_cast<std::size_t>(token * heads + head)];
          }
          CHECK(std::ranges::all_of(found, [](int n) { return n == 1; }));
          CHECK((most > 1 || passes.count == (heads + rows - 1) / rows));
        }
}

TEST_CASE("The chunks of a work tile hold each visible token once, as codes or exact", "[runtime]") {
  const decode::ChunkTokens of =
      GENERATE(decode::ChunkTokens{64, 8}, decode::ChunkTokens{32, 8}, decode::ChunkTokens{8, 8});
  const WindowRule windows = GENERATE(WindowRule{0, 0}, WindowRule{64, 256}, WindowRule{3, 5}, WindowRule{8, 0});
  const int sliding_window = GENERATE(0, 1, 9, 100, 10000), exact_from = GENERATE(0, 7, 64, 300, 2000);
  for (const bool has_sinks : {true, false})
    for (const bool has_ring : {true, false})
      for (const int length : {0, 1, 7, 8, 9, 63, 64, 65, 319, 320, 321, 1501}) {
        CAPTURE(of.coded, windows.sink_tokens, windows.recent_tokens, sliding_window, exact_from);
        CAPTURE(has_sinks, has_ring, length);
        const SequenceTokens tokens = windows.tokens_of(length, exact_from, has_sinks, has_ring);
        const decode::TileChunks chunks = chunks_of(tokens, sliding_window, of);
        const HeldTokens held = held_tokens(chunks, length, of);
        bool right = true;
        for (int p = 0; p < length; ++p) {
          const bool seen = sliding_window == 0 || p >= length - sliding_window;
          right = right && held.coded[static_cast<std::size_t>(p)] == (seen && !tokens.is_exact(p) ? 1 : 0);
          right = right && held.exact[static_cast<std::size_t>(p)] == (seen && tokens.is_exact(p) ? 1 : 0);
        }
        CHECK(right);
        CHECK(chunks.count == chunks.coded_chunks + chunks.sink_chunks + chunks.recent_chunks);
        CHECK((chunks.count == 0) == (length == 0));
      }
}

TEST_CASE("No chunk of a work tile is empty", "[runtime]") {
  const decode::ChunkTokens of{16, 8};
  for (int length = 1; length < 200; ++length)
    for (const int exact_from : {0, 30, 77})
      for (const int sliding_window : {0, 5, 60}) {
        CAPTURE(length, exact_from, sliding_window);
        const SequenceTokens tokens = WindowRule{11, 24}.tokens_of(length, exact_from, true, true);
        const decode::TileChunks c = chunks_of(tokens, sliding_window, of);
        const auto most = [](int first, int behind, int size) {
          return first < behind ? (behind - 1) / size - first / size + 1 : 0;
        };
        CHECK(c.coded_chunks == most(c.coded_begin, c.coded_end, of.coded));
        CHECK(c.sink_chunks == most(c.begin, c.sink_end, of.exact));
        CHECK(c.recent_chunks == most(c.coded_end, c.end, of.exact));
      }
}

TEST_CASE("Splits cover every KV chunk once, none is empty, later rounds are shorter", "[runtime]") {
  for (const Case& c : cases()) {
    const DecodeSchedule s = schedule_of(two_bits(), c);
    CAPTURE(c.multiprocessors, c.kv_heads, c.lengths.size(), s.chunks);
    if (s.too_long) continue;
    std::uint32_t behind = 0, longest = ~0u;
    bool right = true;
    for (int i = 0; i < s.splits.count(); ++i) {
      const auto [begin, end] = s.splits.range_of(i);
      right = right && begin == behind && end > begin;
      if (i % s.splits.per_round == 0) {
        right = right && end - begin <= longest;
        longest = end - begin + 1;
      }
      right = right && end - begin <= longest;
      behind = end;
    }
    CHECK(right);
    CHECK(behind == s.chunks);
    CHECK(s.splits.count() <= decode::CompletionCounter::kMost);
    CHECK(s.idle_blocks == s.grids.decode_blocks - s.splits.per_round);
    CHECK(s.idle_blocks >= 0);
  }
}

TEST_CASE("Each work tile is complete after its partial results, and not before", "[runtime]") {
  for (const Case& c : cases()) {
    const DecodeSchedule s = schedule_of(two_bits(), c);
    CAPTURE(c.multiprocessors, c.kv_heads, c.lengths.size(), s.chunks);
    if (s.too_long) continue;
    const int blocks = s.grids.decode_blocks;
    std::int64_t partials = 0, split_tiles = 0, empty = 0;
    std::vector<long long> entries;
    bool right = true;
    for (int b = 0; b < static_cast<int>(c.lengths.size()); ++b)
      for (int head = 0; head < c.kv_heads; ++head) {
        const auto [begin, end] = s.splits_of(b, head);
        decode::CompletionCounter counter{begin == end ? decode::CompletionCounter::kNone : 0};
        for (int split = begin; split < end; ++split) {
          right = right && !counter.complete();
          const decode::PartialId id{b * c.kv_heads + head, split, split == begin, split == end - 1};
          counter.bits += decode::CompletionCounter::increment(id);
          entries.push_back(decode::partial_index(blocks, id));
        }
        right = right && counter.complete() && counter.partials() == end - begin;
        if (begin < end) right = right && counter.first_split() == begin;
        partials += end - begin, split_tiles += end - begin > 1 ? 1 : 0, empty += begin == end ? 1 : 0;
      }
    CHECK(right);
    CHECK(partials == s.partials);
    CHECK(split_tiles == s.split_tiles);
    CHECK(empty == s.empty_tiles);
    // No two partial results share an entry, and the workspace has all entries.
    std::sort(entries.begin(), entries.end());
    CHECK(std::adjacent_find(entries.begin(), entries.end()) == entries.end());
    if (!entries.empty()) {
      CHECK(entries.front() >= 0);
      CHECK(entries.back() < decode::cut_partials(blocks) + s.work_tiles);
    }
  }
}

TEST_CASE("Partial results may be stored in any order", "[runtime]") {
  std::vector<decode::PartialId> ids = {{0, 70, true, false}, {0, 71, false, false}, {0, 72, false, true}};
  std::sort(ids.begin(), ids.end(), [](const auto& a, const auto& b) { return a.split < b.split; });
  do {
    decode::CompletionCounter counter;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      CHECK_FALSE(counter.complete());
      counter.bits += decode::CompletionCounter::increment(ids[i]);
    }
    CHECK(counter.complete());
    CHECK(counter.partials() == 3);
    CHECK(counter.first_split() == 70);
  } while (
      std::next_permutation(ids.begin(), ids.end(), [](const auto& a, const auto& b) { return a.split < b.split; }));
}

TEST_CASE("A work tile without tokens and one with a fault are complete and have no partial results", "[runtime]") {
  using decode::CompletionCounter;
  for (const unsigned long long bits : {CompletionCounter::kNone, CompletionCounter::kFaulty}) {
    CHECK(CompletionCounter{bits}.complete());
    CHECK(CompletionCounter{bits}.partials() == 0);
  }
  CHECK(CompletionCounter::kNone != CompletionCounter::kFaulty);
  CHECK_FALSE(CompletionCounter{}.complete());
}

TEST_CASE("Sums of increments are never taken for a work tile without tokens or with a fault", "[runtime]") {
  using decode::CompletionCounter;
  const auto special = [](unsigned long long bits) {
    return bits == CompletionCounter::kNone || bits == CompletionCounter::kFaulty;
  };
  for (int first = 0; first < 6; ++first)
    for (int end = first + 1; end < 9; ++end)
      for (unsigned arrived = 1; arrived < 1u << (end - first); ++arrived) {
        CompletionCounter counter;
        for (int split = first; split < end; ++split)
          if (arrived >> (split - first) & 1)
            counter.bits += CompletionCounter::increment({0, split, split == first, split == end - 1});
        CAPTURE(first, end, arrived);
        CHECK_FALSE(special(counter.bits));
      }
}

TEST_CASE("A queue of 2^32 chunks is too long, a shorter one is not", "[runtime]") {
  Case c{.q_heads = 32, .kv_heads = 32, .windows = {}, .lengths = std::vector<std::int32_t>(4, kLongest)};
  CHECK_FALSE(schedule_of(two_bits(), c).too_long);
  c.lengths.push_back(kLongest);
  const DecodeSchedule s = schedule_of(two_bits(), c);
  CHECK(s.too_long);
  CHECK(s.chunks >> 32 == 1);
  CHECK(s.partials == 0);
  CHECK(decode::Splits(s.chunks, 396, 396).count() == 0);
  CHECK(decode::Splits((std::uint64_t{1} << 32) - 1, 396, 396).chunks == 0xFFFFFFFF);
}

TEST_CASE("Units of the combine kernel have each query head once", "[runtime]") {
  for (const DecodeVariant* variant : decode_variants())
    for (const int batch : {1, 2, 3, 33, 264, 1000, 5000})
      for (const int kv_heads : {1, 2, 8})
        for (int group_heads = 1; group_heads <= variant->max_rows; group_heads += 3) {
          CAPTURE(variant->name, batch, kv_heads, group_heads);
          const DecodeGrids grids =
              make_decode_grids(variant->shape, assumed_device(variant->shape, 132), batch, group_heads, kv_heads);
          const decode::CombineSchedule& units = grids.combine;
          CHECK(units.tail_begin + units.tail_passes == batch);
          CHECK(units.tail_begin % units.unit_passes == 0);
          CHECK(units.units_before_tail * units.unit_passes == units.tail_begin * units.tile_units);
          CHECK(units.tile_units * units.unit_rows >= group_heads);
          CHECK((units.tile_units - 1) * units.unit_rows < group_heads);
          CHECK(units.unit_passes * units.unit_rows <= std::max(variant->shape.combine_rows, variant->max_rows));
          CHECK(grids.query_blocks >= 1);
          CHECK(grids.combine_blocks >= 1);
          for (const int blocks : {grids.query_blocks, grids.combine_blocks})
            CHECK((blocks % kv_heads == 0 || blocks < kv_heads || blocks <= 2 * 132));
          CHECK(grids.one_round_splits <= grids.decode_blocks);
          CHECK(grids.decode_blocks - grids.one_round_splits <= grids.decode_blocks / 16);
        }
}

TEST_CASE("Regions of the workspace are aligned, lie apart, and end with it", "[runtime]") {
  for (const DecodeVariant* variant : decode_variants())
    for (const std::size_t work_tiles : {1u, 2u, 31u, 32u, 33u, 8192u, 1000003u}) {
      CAPTURE(variant->name, work_tiles);
      const DecodeDevice device = assumed_device(variant->shape, 132);
      DecodeLaunch launch;
      launch.partial_bytes = variant->shape.partial_bytes, launch.operand_bytes = variant->shape.operand_bytes;
      launch.cut_partials = static_cast<int>(decode::cut_partials(device.blocks));
      const DecodeWorkspace w = decode_workspace(launch, work_tiles);
      const auto partials = static_cast<std::size_t>(launch.cut_partials) + work_tiles;
      CHECK(w.work_counter == 0);
      CHECK(w.completions >= w.work_counter + 4);
      CHECK(w.partials >= w.completions + 8 * work_tiles);
      CHECK(w.operands == w.partials + partials * static_cast<std::size_t>(launch.partial_bytes));
      CHECK(w.total == w.operands + work_tiles * static_cast<std::size_t>(launch.operand_bytes));
      CHECK(w.total == decode_workspace_bytes(launch, work_tiles));
      CHECK(w.completions % 256 == 0);
      CHECK(w.partials % 256 == 0);
      CHECK(w.operands % 16 == 0);
    }
}

TEST_CASE("The policy fits a multiprocessor of 228 KB", "[runtime]") {
  for (const DecodeVariant* variant : decode_variants()) {
    CAPTURE(variant->name);
    const DecodeKernelShape& kernel = variant->shape;
    CHECK(kernel.heads == variant->max_rows);
    CHECK(kernel.policy.multiprocessor_blocks * (kernel.shared_bytes + 1024) <= 228 * 1024);
    CHECK(kernel.stages >= 2);
    CHECK(kernel.tail_rows * 4 == kernel.heads);
  }
}

TEST_CASE("Splits begin where exact division says", "[runtime]") {
  std::uint64_t wrong = 0;
  for (const int blocks : {1, 7, 376, 396, 1000, 65535, decode::Splits::kMostBlocks})
    for (const std::uint64_t chunks :
         {std::uint64_t{1} << 16, (std::uint64_t{1} << 32) - 1, std::uint64_t{4000000007}}) {
      const decode::Splits splits(chunks, blocks, blocks);
      for (int round = 0; round < splits.rounds; ++round) {
        const std::uint64_t begin = splits.round_begin(round), size = splits.round_begin(round + 1) - begin;
        for (const int i : {0, 1, blocks / 3, blocks / 2, blocks - 1}) {
          const auto at = static_cast<std::uint64_t>(std::min(i, splits.per_round - 1)),
                     count = static_cast<std::uint64_t>(splits.per_round);
          const auto range = splits.range_of(round * splits.per_round + static_cast<int>(at));
          wrong += range.begin != begin + size * at / count || range.end != begin + size * (at + 1) / count;
        }
      }
    }
  CHECK(wrong == 0);
}

TEST_CASE("A single sequence leaves the blocks idle that the queries kernel displaces", "[runtime]") {
  const Case c{.q_heads = 32, .kv_heads = 8, .lengths = {32768}};
  const DecodeSchedule s = schedule_of(two_bits(), c);
  CHECK(s.grids.query_blocks == 8);
  CHECK(s.splits.per_round == 376);  // 396 blocks less two for each of 8, rounded down to a multiple of 8 work tiles
  CHECK(s.most_splits == 47);
}

TEST_CASE("The known schedule of a batch of 8 sequences of 32768 tokens", "[runtime]") {
  const Case c{.q_heads = 32, .kv_heads = 8, .lengths = std::vector<std::int32_t>(8, 32768)};
  const DecodeSchedule s = schedule_of(two_bits(), c);
  CHECK(s.work_tiles == 64);
  CHECK(s.chunks == 64 * (507 + 8 + 32));  // 32448 quantized tokens, 64 and 256 exact ones
  CHECK(s.splits.rounds == 1);
  CHECK(s.grids.decode_blocks == 396);
  CHECK(s.splits.per_round == 384);
  CHECK(s.most_splits == 6);
  CHECK(s.partials == 384);
}
