#include <kvq/runtime/kernels/common/prefill_rows.h>
#include <kvq/runtime/kernels/common/prefill_tiles.h>
#include <kvq/runtime/memory_bound.h>

#include <algorithm>

namespace kvq {

std::size_t most_decode_workspace_bytes(const DecodeVariant& variant, int multiprocessors, std::size_t work_tiles) {
  constexpr int kSharedBytes = 228 * 1024, kReservedBytes = 1024, kThreads = 2048, kBlocks = 32;
  const DecodeKernelShape& kernel = variant.shape;
  const int least_threads = 32 * kernel.consumer_warps;
  const int each = std::min({kSharedBytes / (kernel.shared_bytes + kReservedBytes), kThreads / least_threads, kBlocks});
  const int blocks = each * multiprocessors;
  // The generic kernels cut no work tile but into whole splits.
  const auto cut = static_cast<std::size_t>(variant.tuned ? decode::cut_partials(blocks) : blocks);
  return make_decode_workspace(work_tiles, cut, static_cast<std::size_t>(kernel.partial_bytes),
                               static_cast<std::size_t>(kernel.operand_bytes))
      .total;
}

std::size_t prefill_workspace_bytes(const PrefillVariant& variant, const DequantizeVariant& rows,
                                    const PrefillShape& shape) {
  constexpr int kAnyRows = 64;  // of a block, which the workspace does not depend on
  PrefillLaunch launch;
  launch.shape = shape;
  if (variant.tuned) {
    const PrefillTiles tiles{variant.head_dim};
    take_slab(launch, kAnyRows, tiles.tokens(), tiles.bytes());
  } else {
    take_slab(launch, kAnyRows, PrefillRows::kTokens, PrefillRows{rows.k.head_dim, rows.v.head_dim}.work_tile_bytes(1));
  }
  return static_cast<std::size_t>(launch.workspace_bytes);
}

}  // namespace kvq
