#pragma once

#include <kvq/plan/page_layout.h>
#include <kvq/runtime/kernels/decode/schedule.cuh>

#include <algorithm>

namespace kvq {

/// The format of one side of the cache, at compile time.
/// @tparam kNumbersArg  stored for each group: 2 scale and minimum (affine), 1 scale (symmetric), 0 exact rows
/// @tparam kBfloatArg   scales and minima are bfloat16, else fp16
template <int kDim, int kBitsArg, int kGroupArg, int kNumbersArg, bool kBfloatArg = false>
struct SideTraits {
  static constexpr int kHeadDim = kDim, kBits = kBitsArg, kGroup = kGroupArg, kNumbers = kNumbersArg;
  static constexpr bool kBfloat = kBfloatArg;
  KVQ_HD static constexpr TileSide side() { return {kDim, kBitsArg, kGroupArg, kNumbersArg}; }
  static constexpr bool kExact = kBits == 16;
  static constexpr bool kAffine = kNumbers == 2;
  static constexpr int kGroups = kExact ? 1 : kDim / kGroup;
  static constexpr int kStepsInGroup = kExact ? 1 : kGroup / 32;
  static constexpr int kWords = kExact ? 0 : side().words();
  static constexpr int kPerByte = kExact ? 1 : 8 / kBits;
  static constexpr unsigned kMask = kBits == 2 ? 0x03030303u : 0x0F0F0F0Fu;
  static constexpr float kLevels = static_cast<float>((1 << (kExact ? 1 : kBits)) - 1);
  static_assert(kExact || kBits == 2 || kBits == 4);
  static_assert(kExact || (kGroup % 32 == 0 && kDim % kGroup == 0));
  static_assert(kExact || kDim * kBits % 128 == 0, "pieces are whole words");
};

/// @tparam kTeamArg  warps of a team (consumer group), which share a stage, each with four query heads: 1, 2 or 4
template <typename KSideArg, typename VSideArg, int kTeamArg, typename ActivationArg>
struct DecodeTraits {
  using KSide = KSideArg;
  using VSide = VSideArg;
  using Activation = ActivationArg;
  static constexpr int kHeadDim = KSide::kHeadDim;
  static constexpr bool kExact = KSide::kExact;
  static_assert(VSide::kHeadDim == kHeadDim && VSide::kExact == kExact);

  static constexpr int kWarps = 4, kThreads = 32 * kWarps;  ///< consumer warps; there is one producer warp more
  static constexpr int kBlockThreads = kThreads + 32;
  static constexpr int kTeam = kTeamArg, kTeams = kWarps / kTeam;
  static constexpr int kHeads = 4 * kTeam;  ///< query heads of a KV head; the last ones may be padding
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
  /// Registers for three blocks a multiprocessor; two above head_dim 128. With three they are so few that a block of
  /// the combine kernel fits where one decode block has ended.
  static constexpr int kRegisters = kHeadDim <= 128 ? 120 : 168;
  /// Three blocks a multiprocessor have room for about 55 KB of stages each, or for 61 KB and the queries of fewer
  /// items; two (head_dim above 128) for 64 KB.
  static constexpr int kStageBudget = kHeadDim <= 128 ? 55296 : 65536;
  static constexpr int kStagesPerTeam = std::clamp(kStageBudget / (kTeams * kStageBytes), 2, 4);
  /// Teams take stages in turn: load n goes to stage n mod kStages and to team n mod kTeams.
  static constexpr int kStages = kLarge && kTeams == 4 ? 7 : kTeams * kStagesPerTeam;
  static constexpr bool kOwned = kStages % kTeams == 0;              ///< a stage is always used by the same team
  static constexpr int kItems = kHeadDim <= 128 && !kLarge ? 4 : 3;  ///< places: buffers for queries of work tiles

  /// Queries of an item (work tile) as operands of the tensor cores (queries.cuh): four heads a member (warp) of a
  /// team.
  static constexpr int kSteps = kExact ? 1 : kHeadDim / 32;
  struct alignas(16) Operand {
    unsigned fragments[kTeam][kSteps][2][32];  ///< of 16-bit integers, for coded keys
    unsigned halves[kTeam][kBlocks][2][32];    ///< of two bfloat16 halves, for exact ones
    float unit[kHeads], exact_unit[kHeads];    ///< score scales, as in Query (stages.cuh)
    float sums[KSide::kGroups][kHeads];        ///< as in Query
  };
  /// A partial result: for each head the output, not yet divided by the softmax sum, and the softmax state, in base 2.
  struct alignas(16) Record {
    float value[kHeads][kHeadDim];
    float2 state[kHeads];  ///< reference that exponentials are relative to, sum of exponentials
  };
  /// Description of a stage's KV chunk.
  struct alignas(16) StageInfo {
    int flags;              ///< kStage... and the item's place: index of `operands`, `parts` and their barriers
    int first, begin, end;  ///< position of the first token; visible positions
  };
  struct Shared {
    alignas(128) unsigned char stages[kStages][kStageBytes];
    alignas(128) Operand operands[kItems];
    float2 states[kItems][kWarps][4];  ///< softmax state of each warp's share of an item
    StageInfo info[kStages];
    alignas(8) unsigned long long full[kStages], empty[kStages];
    unsigned long long ready[kItems];    ///< query barriers: the item's queries are in `operands`
    unsigned long long left[kItems];     ///< partial barriers: the item's partial result is stored
    unsigned long long settled[kItems];  ///< share barriers: the shares of all consumer warps are in shared memory
    decode::Part parts[kItems];          ///< which item it is, and which part of it
    int ends[kItems][kTeams];            ///< stage that holds each team's share of the item
    int shares[kItems];                  ///< number of warps whose share is stored
    decode::Line<kThreads> line;
  };
  static_assert(kTeams == 1 || kTeam * 4 * kHeadDim * 4 <= kStageBytes, "a stage holds its team's share");
};

/// Flags of a stage. Each team's first and last stage of an item are marked; kStageEnd tells a team to exit.
constexpr int kStageCoded = 1, kStageExact = 2, kStageFirst = 4, kStageLast = 8, kStageEnd = 16, kStageItemShift = 8;

}  // namespace kvq
