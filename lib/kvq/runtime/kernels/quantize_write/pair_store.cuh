#pragma once

#include <kvq/runtime/kernels/common/quantize/codebook.cuh>
#include <kvq/runtime/kernels/quantize_write/code_rows.cuh>
#include <kvq/runtime/kernels/quantize_write/kernel.cuh>
#include <kvq/runtime/kernels/quantize_write/pair_search.cuh>

/// From survivors to stored rows: the third kernel of pair_rows.h.
namespace kvq::write {

/// A warp's memory.
template <int kMemory>
struct PairStoreShared {
  static constexpr int kWindows = 1 << 2 * (kMemory + 1), kUnits = kPairHeadDim / 16, kRuns = 4;
  /// Each lane has a table of its own, in its own bank, if there is room.
  static constexpr int kTables = kMemory < 3 ? 32 : 1;
  float squares[kWindows][kTables];  ///< of values, by window
  /// The codes of 16 channels, the first highest; of each row of a pair. While paths are followed, those of the 16
  /// channels that begin kMemory channels before, and behind the last unit those of the last kMemory channels.
  unsigned codes[kUnits + 1][2][PairBlock::kPairs];
  alignas(16) std::byte tiles[kRuns][TrellisSide<kPairHeadDim>::side().bytes()];
};

/// Finds the codes of both rows of the lane's pair.
template <int kMemory>
__device__ __forceinline__ void follow_paths(const std::byte* block, PairStoreShared<kMemory>& shared, int lane) {
  using Search = PairSearch<kMemory>;
  using Survivors = typename Search::Survivors;
  constexpr int kUnits = PairStoreShared<kMemory>::kUnits, kUnitSteps = 16;
  constexpr int kBatchSteps = kMemory == 3 ? 4 : 16, kUnitBatches = kUnitSteps / kBatchSteps;
  constexpr int kBatches = kUnits * kUnitBatches;
  const auto* survivors = reinterpret_cast<const Survivors*>(block + PairBlock::survivors()) + lane;
  const unsigned ends = __ldcg(reinterpret_cast<const unsigned*>(block + PairBlock{kMemory}.ends()) + lane);
  // The last codes of each path, the oldest highest: the highest ones are the state.
  unsigned path[2] = {ends << (32 - 2 * kMemory), ends >> 16 << (32 - 2 * kMemory)};
  /// What a path dropped, in the lowest two bits.
  const auto dropped_of = [](const Survivors(&all)[Search::kSurvivors], unsigned codes, int row) {
    if constexpr (kMemory == 3) {
      const uint4 &low = all[0], &high = all[1];
      const unsigned first = codes >> 31 ? (row ? high.z : high.x) : (row ? low.z : low.x),
                     second = codes >> 31 ? (row ? high.w : high.y) : (row ? low.w : low.y);
      return (codes >> 30 & 1u ? second : first) >> (codes >> 25 & 30u);
    } else if constexpr (kMemory == 2) {
      return (row ? all[0].y : all[0].x) >> (codes >> 27 & 30u);
    } else {
      return all[0] >> (16 * row + (codes >> 29 & 6u));
    }
  };
  struct Batch {
    Survivors of_step[kBatchSteps][Search::kSurvivors];
  };
  const auto load = [&](int batch, Batch& into) {
    const Survivors* from = survivors + batch * (kBatchSteps * Search::kSurvivors * PairBlock::kPairs);
#pragma unroll
    for (int i = 0; i < kBatchSteps; ++i)
#pragma unroll
      for (int n = 0; n < Search::kSurvivors; ++n)
        into.of_step[i][n] = __ldcg(from + (i * Search::kSurvivors + n) * PairBlock::kPairs);
  };
  // The cheapest path leads back to the state at the seam; then the path that ends in that state is taken. Where both
  // meet, the rest of them is the same. The next batch is loaded while one is followed.
  Batch next;
  load(kBatches - 1, next);
#pragma unroll 1
  for (int batch = kBatches - 1, sweep = 0; sweep < 2;) {
    const Batch now = next;
    const int unit = batch / kUnitBatches, after = batch > 0 ? batch - 1 : kBatches - 1;
    const bool ends_unit = batch % kUnitBatches == 0;
    load(after, next);
#pragma unroll
    for (int i = kBatchSteps - 1; i >= 0; --i)
#pragma unroll
      for (int row = 0; row < 2; ++row)
        path[row] = __funnelshift_r(path[row], dropped_of(now.of_step[i], path[row], row), 2);
    if (ends_unit) {
      unsigned &first = shared.codes[unit][0][lane], &second = shared.codes[unit][1][lane];
      if (sweep == 1 && first == path[0] && second == path[1]) break;
      first = path[0], second = path[1];
    }
    if (batch == 0 && sweep++ == 0) shared.codes[kUnits][0][lane] = path[0], shared.codes[kUnits][1][lane] = path[1];
    batch = after;
  }
#pragma unroll
  for (int row = 0; row < 2; ++row)
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit)
      shared.codes[unit][row][lane] =
          __funnelshift_l(shared.codes[unit + 1][row][lane], shared.codes[unit][row][lane], 2 * kMemory);
}

/// tree(v v) of packing.md (d), of a row of the lane's pair.
template <int kMemory>
__device__ __forceinline__ float sum_of_squares(const PairStoreShared<kMemory>& shared, int row, int lane) {
  constexpr int kUnits = PairStoreShared<kMemory>::kUnits;
  constexpr unsigned kMask = PairStoreShared<kMemory>::kWindows - 1;
  float sums[kUnits];
  unsigned before = shared.codes[kUnits - 1][row][lane];
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    const unsigned own = shared.codes[unit][row][lane];
    float squares[16];
#pragma unroll
    for (int c = 0; c < 16; ++c) {
      const int shift = 30 - 2 * c;  // of the channel's own code
      const unsigned window = c >= kMemory ? own >> shift : __funnelshift_r(own, before, shift);
      squares[c] = shared.squares[window & kMask][lane % PairStoreShared<kMemory>::kTables];
    }
    sums[unit] = kvq::tree_sum(squares);
    before = own;
  }
  return kvq::tree_sum(sums);
}

/// Bits of the scale of a row. @param n  tree(v v)
__device__ __forceinline__ unsigned scale_bits(const PairRow& row, ScaleRule rule, float gain, float n) {
  unsigned short bits;
  stored<false>(row.d, bits);
  if (row.d == 0.0f) return 0;
  const float squares = __fmul_rn(__fmul_rn(gain, gain), n), s = __fsqrt_rn(__fdiv_rn(row.energy, squares));
  if (rule == ScaleRule::norm && squares != 0.0f && s == s) stored<false>(s, bits);
  return bits;
}

/// The even bits of a word in its lower half, the odd ones in its upper half.
__device__ __forceinline__ unsigned unshuffled(unsigned x) {
  const auto swap = [&](unsigned mask, int by) {
    const unsigned differ = (x ^ x >> by) & mask;
    x ^= differ ^ differ << by;
  };
  swap(0x22222222u, 1), swap(0x0C0C0C0Cu, 2), swap(0x00F000F0u, 4), swap(0x0000FF00u, 8);
  return x;
}

/// Puts the codes of both rows of the lane's pair into the tiles of the warp's runs.
template <int kMemory>
__device__ __forceinline__ void lay_out_pair(PairStoreShared<kMemory>& shared, const unsigned (&scales)[2], bool value,
                                             int lane) {
  constexpr TileSide kSide = TrellisSide<kPairHeadDim>::side();
  std::byte* tile = shared.tiles[lane / 8];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int token = lane % 8 + 8 * row;
#pragma unroll
    for (int unit = 0; unit < PairStoreShared<kMemory>::kUnits; unit += 2) {
      // The channels in the order of bits; of each code the higher bit comes first.
      const unsigned first = __brev(shared.codes[unit][row][lane]), second = __brev(shared.codes[unit + 1][row][lane]);
      if (value) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned codes = i ? second : first, in_order = (codes >> 1 & 0x55555555u) | (codes & 0x55555555u) << 1;
#pragma unroll
          for (int byte = 0; byte < 4; ++byte)
            tile[value_byte_offset(kSide, token, 4 * (unit + i) + byte)] =
                static_cast<std::byte>(in_order >> 8 * byte & 0xFFu);
        }
      } else {
        const unsigned low = unshuffled(first), high = unshuffled(second);
        *reinterpret_cast<unsigned*>(tile + key_word_offset(kSide, token, unit)) = __byte_perm(low, high, 0x7632);
        *reinterpret_cast<unsigned*>(tile + key_word_offset(kSide, token, unit + 1)) = __byte_perm(low, high, 0x5410);
      }
    }
    *reinterpret_cast<unsigned short*>(tile + number_offset(kSide, token, 0, 0)) =
        static_cast<unsigned short>(scales[row]);
  }
}

/// Follows the paths of one PairBlock and stores its rows in pages. Grid: as pair_search_kernel.
template <int kMemory>
__global__ void __launch_bounds__(32, 16) pair_store_kernel(const __grid_constant__ WriteParams p) {
  using Side = TrellisSide<kPairHeadDim>;
  using Shared = PairStoreShared<kMemory>;
  constexpr TileSide kSide = Side::side();
  __shared__ Shared shared;
  const int lane = static_cast<int>(threadIdx.x), job = p.pairs.first_job + static_cast<int>(blockIdx.y);
  const bool value = job >= p.num_kv_heads;
  const int head = value ? job - p.num_kv_heads : job, first_token = static_cast<int>(blockIdx.x) * PairBlock::kTokens;
  const WriteSide& from = value ? p.v : p.k;
  // What does not depend on the search is loaded beside the first survivors.
  const float* values = PairTables(from.code, head, kMemory).values;
  constexpr int kOwnWindows = (Shared::kWindows + 31) / 32;
  float own_values[kOwnWindows];
#pragma unroll
  for (int i = 0; i < kOwnWindows; ++i) own_values[i] = __ldg(values + (lane + 32 * i) % Shared::kWindows);
  const float gain = __ldg(&from.code.heads[head].segments[0].gain);
  const std::byte* block = p.pairs.block(job, static_cast<int>(blockIdx.x));
  follow_paths<kMemory>(block, shared, lane);
#pragma unroll
  for (int window = 0; window < Shared::kWindows; ++window) {
    if constexpr (Shared::kTables == 1) {
      if (window < kOwnWindows)
        shared.squares[lane + 32 * window][0] = __fmul_rn(own_values[window], own_values[window]);
    } else {
      const float v = __shfl_sync(kAll, own_values[window / 32], window % 32);
      shared.squares[window][lane] = __fmul_rn(v, v);
    }
  }
  __syncwarp();

  const auto* rows = reinterpret_cast<const PairRow*>(block + PairBlock{kMemory}.rows());
  unsigned scales[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const PairRow row = rows[PairBlock::token(lane, r)];
    const bool finite = row.d == row.d;
    scales[r] = finite ? scale_bits(row, from.rule, gain, sum_of_squares<kMemory>(shared, r, lane)) : 0x7E00u;
    if (finite && __fmul_rn(gain, row.d) > 0.0f) continue;
#pragma unroll 1
    for (int unit = 0; unit < Shared::kUnits; ++unit) shared.codes[unit][r][lane] = finite ? 0xAAAAAAAAu : 0u;
  }
  lay_out_pair<kMemory>(shared, scales, value, lane);
  __syncwarp();

  const WriteJob in_page = job_of_sides(p, value, head);
  const PageTiles tile_of{p.pages, static_cast<unsigned>(p.page_stride), p.page_shift,
                          in_page.head * in_page.head_bytes + in_page.side_offset, kSide.bytes()};
#pragma unroll 1
  for (int run = 0; run < Shared::kRuns; ++run) {
    const int first = first_token + run * kTileTokens;
    if (first >= p.num_tokens) break;
    const bool is_there = lane < kTileTokens && first + lane < p.num_tokens;
    const std::int64_t slots = checked_slot(p, is_there ? __ldcg(p.slot_mapping + first + lane) : -1);
    store_tile<Side>(shared.tiles[run], slots, tile_of, value, lane);
  }
}

}  // namespace kvq::write
