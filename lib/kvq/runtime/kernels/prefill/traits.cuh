#pragma once

#include <kvq/runtime/kernels/common/prefill_tiles.h>

namespace kvq::prefill {

/// Of the kernel for every architecture (kernel.cuh).
template <int kDimArg, typename TArg>
struct PortableTraits {
  using T = TArg;
  static constexpr int kDim = kDimArg;
  static constexpr PrefillTiles kTiles{kDim};
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 16 * kWarps;
  static constexpr int kSubTile = kDim <= 128 ? 64 : 32;     ///< tokens of a sub-tile
  static constexpr int kSubTileBytes = kSubTile * kDim * 2;  ///< of one side
  static_assert(kDim % 64 == 0 && kTiles.tokens() % kSubTile == 0);
  struct Shared {
    alignas(128) unsigned char q[kRows * kDim * 2];
    alignas(128) unsigned char k[2][kSubTileBytes];
    alignas(128) unsigned char v[2][kSubTileBytes];
  };
};

/// Of the kernel for Hopper (sm90_kernel.cuh).
template <int kDimArg, typename TArg>
struct Sm90Traits {
  using T = TArg;
  static constexpr int kDim = kDimArg;
  static constexpr PrefillTiles kTiles{kDim};
  static constexpr int kTile = kTiles.tokens();
  static constexpr int kGroups = 2, kGroupRows = 64, kRows = kGroups * kGroupRows;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kHeldDim = kDim < 192 ? kDim : 192;  ///< channels of the queries in registers
  static constexpr int kRowPanel = kRows * 128;             ///< bytes of 64 channels of the queries in shared memory
  static constexpr int kQueryBytes = (kDim - kHeldDim) / 64 * kRowPanel;
  static constexpr int kEntries = (96 * 1024 - kQueryBytes) / kTiles.side_bytes();
  static_assert(kDim % 64 == 0 && kEntries >= 3, "two are multiplied by while another one is filled");
  struct Shared {
    alignas(1024) unsigned char queries[kQueryBytes > 0 ? kQueryBytes : 1024];
    alignas(1024) unsigned char entries[kEntries][kTiles.side_bytes()];
    alignas(8) unsigned long long full[kEntries], empty[kEntries];
  };
};

}  // namespace kvq::prefill
