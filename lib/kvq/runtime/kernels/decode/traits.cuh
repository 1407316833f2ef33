#pragma once

#include <kvq/runtime/kernels/common/side_traits.h>
#include <kvq/runtime/kernels/decode/schedule.cuh>

#include <algorithm>

namespace kvq {

/// @tparam kGroupWarpsArg  warps of a consumer group, which share a stage, each with four query heads: 1, 2 or 4
template <typename KSideArg, typename VSideArg, int kGroupWarpsArg, typename ActivationArg>
struct DecodeTraits {
  using KSide = KSideArg;
  using VSide = VSideArg;
  using Activation = ActivationArg;
  static constexpr int kHeadDim = KSide::kHeadDim;
  static constexpr bool kExact = KSide::kExact;
  static_assert(VSide::kHeadDim == kHeadDim && VSide::kExact == kExact);

  static constexpr int kWarps = 4, kThreads = 32 * kWarps;  ///< consumer warps; there is one producer warp more
  static constexpr int kBlockThreads = kThreads + 32;
  static constexpr int kGroupWarps = kGroupWarpsArg, kConsumerGroups = kWarps / kGroupWarps;
  static constexpr int kHeads = 4 * kGroupWarps;  ///< query heads of a KV head; the last ones may be padding
  static constexpr int kBlocks = kHeadDim / 16;

  /// Whether all slices of a byte of values are in one group, hence have the same weight. If so, a product may include
  /// the slices above its own, whose product is subtracted, and a mask is saved.
  static constexpr bool nested() {
    for (int block = 1; block < (kExact ? 0 : kBlocks); ++block)
      if (block % VSide::kPerByte != 0 && value_step(VSide::side(), block) / VSide::kStepsInGroup !=
                                              value_step(VSide::side(), block - 1) / VSide::kStepsInGroup)
        return false;
    return !kExact;
  }
  static constexpr bool kNested = nested();

  // A stage holds eight exact tokens, 4 KB at head_dim 128, or as many coded tokens, 32 or 64, as take about the same
  // bytes. At head_dim 128 it may take twice as many bytes, so that a warp attends to 64 tokens of four bits at once,
  // too, with fewer instructions for each. (128 tokens of two bits at once were slower, because the last of them arrive
  // late.)
  static constexpr int kTileBytes = KSide::side().bytes() + VSide::side().bytes();
  static constexpr int kExactTokens = 8, kExactBytes = kExactTokens * kHeadDim * 2;  ///< of one side
  static constexpr bool kSmall = 4 * kTileBytes <= 2 * kExactBytes * (kHeadDim <= 128 ? 5 : 4) / 4;
  static constexpr bool kLarge = !kExact && !kSmall && kHeadDim == 128 && 4 * kTileBytes <= 9216;
  static constexpr int kStageTiles = kSmall || kLarge ? 4 : 2;
  static constexpr int kStageTokens = kExact ? kExactTokens : kStageTiles * kTileTokens;
  static constexpr int kValuesAt =
      kExact ? kExactBytes : kStageTiles * KSide::side().bytes();  ///< byte of a coded stage
  static constexpr int kCodedBytes = kExact ? 0 : kStageTiles * kTileBytes;
  static constexpr int kStageBytes = kCodedBytes > 2 * kExactBytes ? kCodedBytes : 2 * kExactBytes;
  static constexpr DecodePolicy kPolicy = decode_policy(kHeadDim);
  static constexpr int kRegisters = kPolicy.registers;
  static_assert(kPolicy.multiprocessor_blocks * kBlockThreads * kRegisters <= 65536, "registers of a multiprocessor");
  static constexpr int kStagesPerGroup =
      std::clamp(kPolicy.stage_bytes / (kConsumerGroups * kStageBytes), kPolicy.least_stages, kPolicy.most_stages);
  /// Consumer groups take stages in turn: load n goes to stage n mod kStages and to group n mod kConsumerGroups.
  static constexpr int kStages =
      kLarge && kConsumerGroups == 4 ? kPolicy.large_stages : kConsumerGroups * kStagesPerGroup;
  static constexpr bool kOwned = kStages % kConsumerGroups == 0;  ///< a stage is always used by the same group
  static constexpr int kQueryBuffers = kLarge ? kPolicy.large_query_buffers : kPolicy.query_buffers;

  /// Queries of a work tile as operands of the tensor cores (queries.cuh): four heads a consumer warp.
  static constexpr int kSteps = kExact ? 1 : kHeadDim / 32;
  struct alignas(16) Operand {
    unsigned fragments[kGroupWarps][kSteps][2][32];        ///< of 16-bit integers, for coded keys
    unsigned halves[kGroupWarps][kBlocks][2][32];          ///< of two bfloat16 halves, for exact ones
    float score_scale[kHeads], exact_score_ratio[kHeads];  ///< score scales, as in Query (stages.cuh)
    float sums[KSide::kGroups][kHeads];                    ///< as in Query
  };
  /// A partial result: for each head the output, not yet divided by the softmax sum, and the softmax state, in base 2.
  struct alignas(16) Partial {
    float value[kHeads][kHeadDim];
    float2 state[kHeads];  ///< reference that exponentials are relative to, sum of exponentials
  };
  /// Description of a stage's KV chunk.
  struct alignas(16) StageInfo {
    int flags;  ///< kStage... and the work tile's query buffer: index of `operands`, `partial_ids` and their barriers
    int first, begin, end;  ///< position of the first token; visible positions
  };
  struct DecodeShared {
    alignas(128) unsigned char stages[kStages][kStageBytes];
    alignas(128) Operand operands[kQueryBuffers];
    float2 states[kQueryBuffers][kWarps][4];  ///< softmax state of each warp's share of a work tile
    StageInfo info[kStages];
    alignas(8) unsigned long long full[kStages], empty[kStages];
    unsigned long long queries_full[kQueryBuffers];     ///< query barriers: the work tile's queries are in `operands`
    unsigned long long partials_stored[kQueryBuffers];  ///< partial barriers: the partial result is stored
    /// share barriers: the shares of all consumer warps, summed over lanes, are in shared memory
    unsigned long long shares_reduced[kQueryBuffers];
    decode::PartialId partial_ids[kQueryBuffers];      ///< which work tile and split
    int share_stages[kQueryBuffers][kConsumerGroups];  ///< stage that holds each group's share of the work tile
    int shares_stored[kQueryBuffers];                  ///< number of warps whose share is stored
    decode::ChunkQueue<kThreads> queue;
  };
  static_assert(kConsumerGroups == 1 || kGroupWarps * 4 * kHeadDim * 4 <= kStageBytes,
                "a stage holds its group's share");
};

/// Flags of a stage. Each consumer group's first and last stage of a work tile are marked; kStageEnd tells a group to
/// exit.
constexpr int kStageCoded = 1, kStageExact = 2, kStageFirst = 4, kStageLast = 8, kStageEnd = 16, kStageBufferShift = 8;

}  // namespace kvq
