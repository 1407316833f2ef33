#pragma once

#include <kvq/plan/kernel_limits.h>
#include <kvq/runtime/kernels/common/side_traits.h>
#include <kvq/runtime/kernels/decode/partial.h>
#include <kvq/runtime/kernels/decode/schedule.cuh>

#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

namespace kvq {

/// @tparam kRowsArg  4, 8 or 16 rows of a work tile: queries that attend to the same keys and values
template <typename KSideArg, typename VSideArg, int kRowsArg, typename ActivationArg>
struct DecodeTraits {
  using KSide = KSideArg;
  using VSide = VSideArg;
  using Activation = ActivationArg;
  static constexpr int kHeadDim = KSide::kHeadDim;
  static constexpr bool kExact = KSide::kExact;
  static constexpr bool kLinear = VSide::kLinear;  ///< values are rows of bits (linear_rows.cuh)
  static constexpr bool kTable = VSide::kTable;    ///< values are codebook codes (table_rows.cuh)
  static constexpr bool kBitTiles = kLinear || kTable;
  static_assert(VSide::kHeadDim == kHeadDim && VSide::kExact == kExact);
  static_assert(KSide::kSegments ? kBitTiles : KSide::kLinear == kLinear && KSide::kTable == kTable,
                "keys of mixed widths go with values in bit tiles, other keys with values of their kind");

  // Rows with centroids (centroids.cuh).
  static constexpr bool kKeyCentroids = KSide::kIndexBytes > 0, kValueCentroids = VSide::kIndexBytes > 0;
  static constexpr bool kCentroids = kKeyCentroids || kValueCentroids;
  static_assert(KSide::kIndexBytes <= 1 && VSide::kIndexBytes <= 1);
  static_assert(!kCentroids || (kRowsArg == 4 && kHeadDim == 128 && !kExact && !kBitTiles),
                "rows with centroids have a kernel for codes of head_dim 128 and four rows");

  static constexpr int kConsumerWarps = 4, kConsumerThreads = 32 * kConsumerWarps;
  static constexpr int kBlockThreads = kConsumerThreads + 32;  ///< with the producer warp
  static constexpr int kHeads = kRowsArg;                      ///< rows of a work tile; the last ones may be padding
  static_assert(kHeads == 4 || kHeads == 8 || kHeads == 16);
  static constexpr bool kManyRows = kHeads > 4 && !kBitTiles;  ///< many_rows.cuh, else four_rows.cuh
  static constexpr int kRowBlocks = (kHeads + 7) / 8;          ///< of eight rows, the columns of a product
  /// The rows of a work tile in fours: the high and low parts of four rows are the eight columns of an integer product.
  static constexpr int kFours = kHeads / 4;
  /// Shares are merged in kShareParts parts, one after the other, of kShareRows rows each (share.cuh).
  static constexpr int kShareParts = kManyRows ? kRowBlocks : kFours, kShareRows = kHeads / kShareParts;
  static constexpr int kChannelBlocks = kHeadDim / 16;  ///< of 16 channels, the rows of a product
  static_assert(!kBitTiles || kHeads <= 8, "bit tiles have no kernel for more rows");
  /// Blocks of 16 sums of weighted values: of channels, or of the bits of linear rows.
  static constexpr int kSumBlocks = [] {
    if constexpr (kLinear) return 8 * VSide::kPairs;
    return kChannelBlocks;
  }();
  static constexpr int kSums = 16 * kSumBlocks;
  /// Linear rows of more than eight words, tables of four bits, eight rows of bit tiles.
  static constexpr bool kWide = [] {
    if (kBitTiles && kHeads > 4) return true;
    const auto is_wide = []<typename Side>(std::type_identity<Side>) {
      if constexpr (Side::kLinear) return Side::kRowWords > 8;
      if constexpr (Side::kTable) return Side::kBits > 3;
      return false;
    };
    return is_wide(std::type_identity<KSide>{}) || is_wide(std::type_identity<VSide>{});
  }();

  /// Slices are the codes of two or four bits in a byte (page_layout.h). True if all slices of a byte of values are in
  /// one group, hence have the same weight. Then the product for a slice may leave the higher slices in the byte, and
  /// the product of the higher slices, which is known already, is subtracted. So the lowest slice needs no mask.
  static constexpr bool nested() {
    if constexpr (kExact || kBitTiles) {
      return false;
    } else {
      for (int block = 1; block < kChannelBlocks; ++block)
        if (block % VSide::kPerByte != 0 && value_step(VSide::side(), block) / VSide::kStepsInGroup !=
                                                value_step(VSide::side(), block - 1) / VSide::kStepsInGroup)
          return false;
      return true;
    }
  }
  static constexpr bool kNested = nested();

  // A stage holds eight exact tokens, 4 KB at head_dim 128, or as many coded tokens as take about the same bytes: 64,
  // four tiles, if they exceed an exact stage by 1/4 at most (two bits in groups of 64: 5120 bytes), else 32. At
  // head_dim 128 four tiles may take kMostLargeBytes (four bits in groups of 64), so that a warp attends to 64 tokens
  // of four bits at once, too, with fewer instructions for each (many rows are attended to 32 tokens at a time anyway).
  // Above head_dim 128 the codes of four tiles of two bits alone take as much as an exact stage, so a stage has two
  // tiles. (128 tokens of two bits at once were slower, because the last of them arrive late.)
  static constexpr int kTileBytes = KSide::side().bytes() + VSide::side().bytes();
  static constexpr int kExactTokens = 8, kExactBytes = kExactTokens * kHeadDim * 2;  ///< of one side
  static constexpr int kMostLargeBytes = 9216;
  static constexpr bool kFourTilesFit = 4 * kTileBytes <= 2 * kExactBytes * (kHeadDim <= 128 ? 5 : 4) / 4;
  static constexpr bool kLargeStage =
      !kExact && !kManyRows && !kFourTilesFit && kHeadDim == 128 && 4 * kTileBytes <= kMostLargeBytes;
  static constexpr int kStageTiles = kFourTilesFit || kLargeStage ? 4 : 2;
  static constexpr int kStageTokens = kExact ? kExactTokens : kStageTiles * kTileTokens;
  static constexpr int kValuesAt =
      kExact ? kExactBytes : kStageTiles * KSide::side().bytes();  ///< byte of a coded stage
  static constexpr int kCodedBytes = kExact ? 0 : kStageTiles * kTileBytes;
  /// A stage has room for a warp's sums, too (share.cuh).
  static constexpr int kStageBytes = std::max({kCodedBytes, 2 * kExactBytes, kLinear ? 4 * kShareRows* kSums : 0});
  static constexpr DecodePolicy kPolicy = decode_policy(kHeadDim, kHeads, kLinear, kWide, kCentroids);
  static constexpr int kRegisters = kPolicy.registers;
  /// A multiprocessor has four partitions, with 16384 registers each, to which it deals warps in turn.
  static constexpr int kPartitionWarps = (kPolicy.multiprocessor_blocks * (kBlockThreads / 32) + 3) / 4;
  static_assert(kPartitionWarps * 32 * kRegisters <= 16384, "registers of a partition");
  static constexpr int kSegmentBytes = 6144;  ///< what queries for keys of mixed widths, with programs, take more
  static constexpr int kStagesPerWarp =
      std::clamp((kPolicy.ring_bytes - (KSide::kSegments ? kSegmentBytes : 0)) / (kConsumerWarps * kStageBytes),
                 kPolicy.least_stages, kPolicy.most_stages);
  /// Consumer warps take stages in turn: load n goes to stage n mod kStages and to consumer warp n mod kConsumerWarps.
  static constexpr int kStages = kLargeStage ? kPolicy.large_stages : kConsumerWarps * kStagesPerWarp;
  static constexpr bool kOwned = kStages % kConsumerWarps == 0;  ///< a stage is always used by the same consumer warp
  /// A query buffer is the slot of a work tile in a block: the index of its queries, and of all else in DecodeShared
  /// that there is kQueryBuffers of.
  static constexpr int kQueryBuffers = KSide::kSegments || (kTable && kWide) || (kBitTiles && kHeads > 4) ? 2
                                       : kLargeStage ? kPolicy.large_query_buffers
                                                     : kPolicy.query_buffers;

  /// Queries of a work tile as operands of the tensor cores (queries.cuh).
  static constexpr int kPlanes = 14;  ///< bits of a query's integers, for bit tiles: even
  static constexpr int kSteps = [] {
    if constexpr (KSide::kSegments)
      return KSide::kWords;
    else if constexpr (kBitTiles)
      return KSide::kChunks * (kPlanes / 2);
    else
      return kExact ? 1 : kHeadDim / 32;
  }();
  /// Number of a row in the work tile: row `i` of the four with number `four`. Of many rows, a lane has rows 2 t and
  /// 2 t + 1 of each row block, from neighboring fours (many_rows.cuh).
  static __host__ __device__ constexpr int row_of(int four, int i) {
    return kManyRows ? four / 2 * 8 + 2 * i + four % 2 : 4 * four + i;
  }
  /// Factor in the integer products of queries and coded keys: four rows do not shift the codes of odd slices.
  static constexpr int kProductUnit = kManyRows || kExact || kBitTiles ? 1 : 1 << KSide::kBits;
  /// Many rows: fp16 numbers whose sum is a weight. One is precise enough, except if results are fp16.
  static constexpr int kWeightParts = kManyRows && std::is_same_v<Activation, __half> ? 2 : 1;
  struct NoLevels {};
  struct alignas(16) Levels {
    LevelTable value_levels;  ///< of the values' head
  };
  struct NoProgram {};
  struct alignas(16) Program {
    SegmentProgram program;  ///< of the keys' head
  };
  struct NoCentroidScores {};
  struct CentroidScores {
    /// Of the queries with each centroid, in multiples of `score_scale`.
    float centroid_scores[kMostTunedCentroids][kHeads];
  };
  struct alignas(16) Operand : std::conditional_t<kTable, Levels, NoLevels>,
                               std::conditional_t<KSide::kSegments, Program, NoProgram>,
                               std::conditional_t<kKeyCentroids, CentroidScores, NoCentroidScores> {
    /// For coded keys: 16-bit integers, of each step of 32 channels. Words of a lane: two of each four. For keys of
    /// mixed widths a step is a unit. For other bit tiles: of each chunk of words, the bits of the integers, two planes
    /// of all rows at a time.
    alignas(16) unsigned fragments[kSteps][kShareParts][32][kManyRows ? 4 : 2];
    /// For exact keys: each channel as two bfloat16 parts, high and low (rotate.cuh). Of four rows both parts are
    /// columns of one product; of many rows each part has an array of its own.
    unsigned bf16_parts[kChannelBlocks][kManyRows ? 2 : kFours][32][kManyRows ? 2 * kRowBlocks : 2];
    float score_scale[kHeads];        ///< base-2 score of a product of 1 with coded keys, never 0
    float exact_score_ratio[kHeads];  ///< score of a product of 1 with exact keys, in multiples of `score_scale`
    /// Of q over the group, as products with coded keys count; symmetric: times half the largest code.
    float sums[KSide::kGroups][kHeads];
    // Read only where rows see different tokens, or where scores are capped.
    int row_begin[kHeads];  ///< of each row: RowSight
    std::uint32_t row_mask[kHeads];
    float center_scores[kHeads];  ///< q . center_k in base 2, which capped scores include
    int new_begin;                ///< of all rows: RowSight
    __device__ __forceinline__ decode::RowSight sight(int row) const {
      return {row_begin[row], new_begin, row_mask[row]};
    }
  };
  using Partial = DecodePartial<kHeads, kHeadDim>;
  /// Description of a stage's KV chunk. An empty stage is neither coded nor exact: it has flags only.
  struct alignas(16) StageInfo {
    int flags;              ///< kStage... and the work tile's query buffer
    int first, begin, end;  ///< position of the first token; visible positions
  };
  struct NoExactSums {};
  /// Of bit tiles, sums of exact tokens are not those of coded ones: they are of channels in their usual order.
  struct ExactSums {
    float2 exact_sums[kConsumerWarps][kFours][kChannelBlocks + 1][32];  ///< of each lane (FourRowsExact)
  };
  struct NoMasses {};
  struct Masses {
    unsigned masses[kConsumerWarps][kMostTunedCentroids][kHeads];  ///< CentroidMasses of each consumer warp
    float mass_units[2][kConsumerWarps][kHeads];  ///< CentroidMasses::log_units of each share, in turn as `states`
  };
  struct DecodeShared : std::conditional_t<kBitTiles, ExactSums, NoExactSums>,
                        std::conditional_t<kValueCentroids, Masses, NoMasses> {
    alignas(128) unsigned char stages[kStages][kStageBytes];
    alignas(128) Operand operands[kQueryBuffers];
    float2 states[2][kConsumerWarps][kHeads];  ///< softmax state of each row in a consumer warp's share (store_share)
    StageInfo info[kStages];
    alignas(8) unsigned long long full[kStages], empty[kStages];
    unsigned long long queries_full[kQueryBuffers];     ///< query barriers: the work tile's queries are in `operands`
    unsigned long long partials_stored[kQueryBuffers];  ///< partial barriers: the partial result is stored
    decode::PartialId partial_ids[kQueryBuffers];       ///< which work tile and split
    decode::ChunkQueue<kConsumerThreads> queue;
  };
};

/// Flags of a stage. Each consumer warp's first and last stage of a work tile are marked; kStageEnd tells a warp to
/// exit. A faulty stage holds nothing, because its tokens cannot be read; it makes the result NaN. Of a ragged stage,
/// rows see different tokens. kStageExactPart: of bit tiles, the block's part of the work tile has exact stages.
constexpr int kStageCoded = 1, kStageExact = 2, kStageFirst = 4, kStageLast = 8, kStageEnd = 16, kStageFaulty = 32,
              kStageRagged = 64, kStageExactPart = 128, kStageBufferShift = 8;

}  // namespace kvq
