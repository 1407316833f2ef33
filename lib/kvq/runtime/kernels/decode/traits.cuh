#pragma once

#include <kvq/runtime/kernels/common/side_traits.h>
#include <kvq/runtime/kernels/decode/schedule.cuh>

#include <algorithm>

namespace kvq {

/// @tparam kConsumerGroupWarpsArg  1, 2 or 4 warps of a consumer group, which read the same stage, for four query heads
///                                 each
template <typename KSideArg, typename VSideArg, int kConsumerGroupWarpsArg, typename ActivationArg>
struct DecodeTraits {
  using KSide = KSideArg;
  using VSide = VSideArg;
  using Activation = ActivationArg;
  static constexpr int kHeadDim = KSide::kHeadDim;
  static constexpr bool kExact = KSide::kExact;
  static_assert(VSide::kHeadDim == kHeadDim && VSide::kExact == kExact);

  static constexpr int kConsumerWarps = 4, kConsumerThreads = 32 * kConsumerWarps;
  static constexpr int kBlockThreads = kConsumerThreads + 32;  ///< with the producer warp
  static constexpr int kConsumerGroupWarps = kConsumerGroupWarpsArg,
                       kConsumerGroups = kConsumerWarps / kConsumerGroupWarps;
  static constexpr int kHeads = 4 * kConsumerGroupWarps;  ///< rows of a work tile; the last ones may be padding
  static constexpr int kChannelBlocks = kHeadDim / 16;    ///< of 16 channels, the rows of a product

  /// Slices are the codes of two or four bits in a byte (page_layout.h). True if all slices of a byte of values are in
  /// one group, hence have the same weight. Then the product for a slice may leave the higher slices in the byte, and
  /// the product of the higher slices, which is known already, is subtracted. So the lowest slice needs no mask.
  static constexpr bool nested() {
    for (int block = 1; block < (kExact ? 0 : kChannelBlocks); ++block)
      if (block % VSide::kPerByte != 0 && value_step(VSide::side(), block) / VSide::kStepsInGroup !=
                                              value_step(VSide::side(), block - 1) / VSide::kStepsInGroup)
        return false;
    return !kExact;
  }
  static constexpr bool kNested = nested();

  // A stage holds eight exact tokens, 4 KB at head_dim 128, or as many coded tokens as take about the same bytes: 64,
  // four tiles, if they exceed an exact stage by 1/4 at most (two bits in groups of 64: 5120 bytes), else 32. At
  // head_dim 128 four tiles may take kMostLargeBytes (four bits in groups of 64), so that a warp attends to 64 tokens
  // of four bits at once, too, with fewer instructions for each. Above head_dim 128 the codes of four tiles of two bits
  // alone take as much as an exact stage, so a stage has two tiles. (128 tokens of two bits at once were slower,
  // because the last of them arrive late.)
  static constexpr int kTileBytes = KSide::side().bytes() + VSide::side().bytes();
  static constexpr int kExactTokens = 8, kExactBytes = kExactTokens * kHeadDim * 2;  ///< of one side
  static constexpr int kMostLargeBytes = 9216;
  static constexpr bool kFourTilesFit = 4 * kTileBytes <= 2 * kExactBytes * (kHeadDim <= 128 ? 5 : 4) / 4;
  static constexpr bool kLargeStage = !kExact && !kFourTilesFit && kHeadDim == 128 && 4 * kTileBytes <= kMostLargeBytes;
  static constexpr int kStageTiles = kFourTilesFit || kLargeStage ? 4 : 2;
  static constexpr int kStageTokens = kExact ? kExactTokens : kStageTiles * kTileTokens;
  static constexpr int kValuesAt =
      kExact ? kExactBytes : kStageTiles * KSide::side().bytes();  ///< byte of a coded stage
  static constexpr int kCodedBytes = kExact ? 0 : kStageTiles * kTileBytes;
  static constexpr int kStageBytes = kCodedBytes > 2 * kExactBytes ? kCodedBytes : 2 * kExactBytes;
  static constexpr DecodePolicy kPolicy = decode_policy(kHeadDim, !kExact && !kLargeStage && kConsumerGroupWarps == 4);
  static constexpr int kRegisters = kPolicy.registers;
  static_assert(kPolicy.multiprocessor_blocks * kBlockThreads * kRegisters <= 65536, "registers of a multiprocessor");
  static constexpr int kStagesPerGroup =
      std::clamp(kPolicy.ring_bytes / (kConsumerGroups * kStageBytes), kPolicy.least_stages, kPolicy.most_stages);
  /// Consumer groups take stages in turn: load n goes to stage n mod kStages and to group n mod kConsumerGroups.
  static constexpr int kStages =
      kLargeStage && kConsumerGroups == 4 ? kPolicy.large_stages : kConsumerGroups * kStagesPerGroup;
  static constexpr bool kOwned = kStages % kConsumerGroups == 0;  ///< a stage is always used by the same group
  /// A query buffer is the slot of a work tile in a block: the index of its queries, and of all else in DecodeShared
  /// that there is kQueryBuffers of.
  static constexpr int kQueryBuffers = kLargeStage ? kPolicy.large_query_buffers : kPolicy.query_buffers;

  /// Queries of a work tile as operands of the tensor cores (queries.cuh): four heads a consumer warp.
  static constexpr int kSteps = kExact ? 1 : kHeadDim / 32;
  struct alignas(16) Operand {
    unsigned fragments[kConsumerGroupWarps][kSteps][2][32];  ///< of 16-bit integers, for coded keys
    /// For exact keys: each channel as two bfloat16 parts, high and low (rotate.cuh).
    unsigned bf16_parts[kConsumerGroupWarps][kChannelBlocks][2][32];
    float score_scale[kHeads], exact_score_ratio[kHeads];  ///< score scales, as in Query (stages.cuh)
    float sums[KSide::kGroups][kHeads];                    ///< as in Query
    // Read only where rows see different tokens, or where scores are capped.
    int row_begin[kHeads];  ///< of each row: RowSight
    std::uint32_t row_mask[kHeads];
    float center_scores[kHeads];  ///< q . center_k in base 2, which capped scores include
    int new_begin;                ///< of all rows: RowSight
    __device__ __forceinline__ decode::RowSight sight(int row) const {
      return {row_begin[row], new_begin, row_mask[row]};
    }
  };
  /// A partial result: for each head the output, not yet divided by the softmax sum, and the softmax state, in base 2.
  struct alignas(16) Partial {
    float value[kHeads][kHeadDim];
    float2 state[kHeads];  ///< reference that exponentials are relative to, sum of exponentials
  };
  /// Description of a stage's KV chunk. An empty stage is neither coded nor exact: it has flags only.
  struct alignas(16) StageInfo {
    int flags;              ///< kStage... and the work tile's query buffer
    int first, begin, end;  ///< position of the first token; visible positions
  };
  struct DecodeShared {
    alignas(128) unsigned char stages[kStages][kStageBytes];
    alignas(128) Operand operands[kQueryBuffers];
    float2 states[kQueryBuffers][kConsumerWarps][4];  ///< softmax state of each warp's heads in its group's share
    StageInfo info[kStages];
    alignas(8) unsigned long long full[kStages], empty[kStages];
    unsigned long long queries_full[kQueryBuffers];     ///< query barriers: the work tile's queries are in `operands`
    unsigned long long partials_stored[kQueryBuffers];  ///< partial barriers: the partial result is stored
    /// share barriers: all consumer warps have stored their heads of their group's share in shared memory
    unsigned long long shares_stored[kQueryBuffers];
    decode::PartialId partial_ids[kQueryBuffers];      ///< which work tile and split
    int share_stages[kQueryBuffers][kConsumerGroups];  ///< stage that holds each group's share of the work tile
    int warps_done[kQueryBuffers];  ///< consumer warps that have stored their heads of a share; the last one merges
    decode::ChunkQueue<kConsumerThreads> queue;
  };
  static_assert(kConsumerGroups == 1 || kConsumerGroupWarps * 4 * kHeadDim * 4 <= kStageBytes,
                "a stage holds its group's share");
};

/// Flags of a stage. Each consumer group's first and last stage of a work tile are marked; kStageEnd tells a group to
/// exit. A faulty stage holds nothing, because its tokens cannot be read; it makes the result NaN. Of a ragged stage,
/// rows see different tokens.
constexpr int kStageCoded = 1, kStageExact = 2, kStageFirst = 4, kStageLast = 8, kStageEnd = 16, kStageFaulty = 32,
              kStageRagged = 64, kStageBufferShift = 8;

}  // namespace kvq
