#pragma once

#include <kvq/plan/page_layout.h>
#include <kvq/runtime/kernels/decode/schedule.cuh>

#include <algorithm>

namespace kvq {

/// What one side of the cache is, at compile time.
/// @tparam kBfloat  the numbers beside the codes are bfloat16, else fp16
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

/// @tparam kTeamArg  warps that share a stage, each with four query heads: 1, 2 or 4
template <typename KSideArg, typename VSideArg, int kTeamArg, typename ActivationArg>
struct DecodeTraits {
  using KSide = KSideArg;
  using VSide = VSideArg;
  using Activation = ActivationArg;
  static constexpr int kHeadDim = KSide::kHeadDim;
  static constexpr bool kExact = KSide::kExact;
  static_assert(VSide::kHeadDim == kHeadDim && VSide::kExact == kExact);

  static constexpr int kWarps = 4, kThreads = 32 * kWarps;  ///< that attend; one more warp loads
  static constexpr int kBlockThreads = kThreads + 32;
  static constexpr int kTeam = kTeamArg, kTeams = kWarps / kTeam;
  static constexpr int kHeads = 4 * kTeam;  ///< query heads of a KV head, the last ones may be idle
  static constexpr int kBlocks = kHeadDim / 16;

  /// Whether all slices of a byte of values are in one group, hence have the same weight: then a product may take in
  /// the slices above its own, which saves a mask.
  static constexpr bool nested() {
    for (int block = 1; block < (kExact ? 0 : kBlocks); ++block)
      if (block % VSide::kPerByte != 0 && value_step(VSide::side(), block) / VSide::kStepsInGroup !=
                                              value_step(VSide::side(), block - 1) / VSide::kStepsInGroup)
        return false;
    return !kExact;
  }
  static constexpr bool kNested = nested();

  // Stages: exact tokens by eight, 4 KB at head_dim 128; coded ones by steps of 32, as many as take about as many
  // bytes. At head_dim 128 there may be twice as many bytes, so that a warp takes 64 tokens of four bits at once too:
  // it has fewer instructions for each. (128 tokens of two bits at once were slower: the last ones come late.)
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
  /// Three blocks a multiprocessor have room for about 55 KB of stages each, or 61 KB and queries of fewer items; two
  /// (head_dim above 128) for 64 KB.
  /// For as many blocks; and of three so few that where one has ended, a block that combines results comes up.
  static constexpr int kRegisters = kHeadDim <= 128 ? 120 : 168;
  static constexpr int kStageBudget = kHeadDim <= 128 ? 55296 : 65536;
  static constexpr int kStagesPerTeam = std::clamp(kStageBudget / (kTeams * kStageBytes), 2, 4);
  /// Teams take loads in turn: load n is team n mod kTeams' and lies in stage n mod kStages.
  static constexpr int kStages = kLarge && kTeams == 4 ? 7 : kTeams * kStagesPerTeam;
  static constexpr bool kOwned = kStages % kTeams == 0;              ///< a stage is always the same team's
  static constexpr int kItems = kHeadDim <= 128 && !kLarge ? 4 : 3;  ///< items whose queries are there at once

  /// Queries of an item as the attending warps take them (queries.cuh): four heads a member of a team.
  static constexpr int kSteps = kExact ? 1 : kHeadDim / 32;
  struct alignas(16) Operand {
    unsigned fragments[kTeam][kSteps][2][32];  ///< of 16-bit integers, for coded keys
    unsigned halves[kTeam][kBlocks][2][32];    ///< of two bfloat16 halves, for exact ones
    float unit[kHeads], exact_unit[kHeads];
    float sums[KSide::kGroups][kHeads];
  };
  /// A partial result: values of each head, not divided by the sum, and the reference of its exponentials, in base 2.
  struct alignas(16) Record {
    float value[kHeads][kHeadDim];
    float2 state[kHeads];  ///< largest score, sum
  };
  /// What a stage holds.
  struct alignas(16) StageInfo {
    int flags;              ///< kStage... and the item's place in `items`
    int first, begin, end;  ///< position of the first token; visible positions
  };
  struct Shared {
    alignas(128) unsigned char stages[kStages][kStageBytes];
    alignas(128) Operand operands[kItems];
    float2 states[kItems][kWarps][4];  ///< of each warp's share of an item
    StageInfo info[kStages];
    alignas(8) unsigned long long full[kStages], empty[kStages];
    unsigned long long ready[kItems];    ///< barriers: the item's queries are there
    unsigned long long left[kItems];     ///< barriers: its partial result has been left
    unsigned long long settled[kItems];  ///< barriers: all shares of it are there
    decode::Part parts[kItems];          ///< what it is
    int ends[kItems][kTeams];            ///< the stages that hold the warps' shares of an item
    int shares[kItems];                  ///< how many of them are there
    decode::Line<kThreads> line;
  };
  static_assert(kTeams == 1 || kTeam * 4 * kHeadDim * 4 <= kStageBytes, "a stage holds its team's share");
};

/// Flags of a stage. The first and the last ones of an item are marked for every team.
constexpr int kStageCoded = 1, kStageExact = 2, kStageFirst = 4, kStageLast = 8, kStageEnd = 16, kStageItemShift = 8;

}  // namespace kvq
