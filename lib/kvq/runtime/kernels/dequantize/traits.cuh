#pragma once

#include <kvq/runtime/kernels/common/side_traits.h>

namespace kvq::dequantize {

/// The products of 16 tokens by 16 channels (steps) that a row takes (fragments.cuh).
template <typename Side>
struct Steps {
  static constexpr int kCount = Side::kHeadDim / 16;
  static constexpr int kGroups = Side::kExact ? 1 : Side::kGroups;

  /// The i-th of the 16 channels of a step; lane 4 g + t has i = 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
  KVQ_HD static constexpr int channel(bool value, int step, int i) {
    if (value) return value_channel(Side::side(), 16 * step + i);
    return 32 * (step / 2) + i % 8 / 2 * 8 + step % 2 * 4 + i / 8 * 2 + i % 2;
  }
  KVQ_HD static constexpr int group(bool value, int step) {
    if (Side::kExact) return 0;
    return (value ? value_step(Side::side(), step) : step / 2) / Side::kStepsInGroup;
  }
};

template <typename KSideArg, typename VSideArg, typename ActivationArg>
struct DequantizeTraits {
  using KSide = KSideArg;
  using VSide = VSideArg;
  using Activation = ActivationArg;
  static constexpr int kHeadDim = KSide::kHeadDim;
  static_assert(VSide::kHeadDim == kHeadDim);
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;  ///< prepare() requires 128 threads
  static constexpr int kMinBlocks = kHeadDim <= 128 ? 3 : 2;
  static constexpr int kColumns = kHeadDim <= 128 ? kHeadDim : kHeadDim / 2;  ///< columns of the matrix in a block
  static constexpr int kColumnBlocks = kHeadDim / kColumns, kFours = kColumns / 32;
  static constexpr int kTiles = kHeadDim <= 128 ? 2 : 1;  ///< tiles of 16 tokens that a warp takes at once
  static constexpr int kTokens = kTiles * kTileTokens;
  static constexpr int kGroups =
      Steps<KSide>::kGroups > Steps<VSide>::kGroups ? Steps<KSide>::kGroups : Steps<VSide>::kGroups;
  static_assert(kColumns % 32 == 0);
  struct Shared {
    /// [step][32 columns][half of these columns' products][lane]: registers of two products.
    alignas(16) unsigned matrix[kHeadDim / 16][kFours][2][32][4];
    float sums[kGroups][kColumns];  ///< sum of the matrix's rows of a group
    float factor[kColumns], center[kColumns];
  };
  static_assert(sizeof(Shared) <= 99 * 1024, "what a block has on every architecture");
};

}  // namespace kvq::dequantize
