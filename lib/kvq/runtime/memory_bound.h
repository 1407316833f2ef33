#pragma once

#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/runtime/kernels/prefill/variant.h>

#include <cstddef>

/// Bytes of workspaces without a device.
namespace kvq {

/// An upper bound of decode_workspace_bytes() on devices of `multiprocessors` or fewer, each with at most 228 KiB of
/// shared memory, 2048 threads and 32 blocks, as all up to compute capability 12.
/// @param work_tiles  batch * num_kv_heads
std::size_t most_decode_workspace_bytes(const DecodeVariant& variant, int multiprocessors, std::size_t work_tiles);

/// The workspace of a prefill plan: the same on all devices.
std::size_t prefill_workspace_bytes(const PrefillVariant& variant, const DequantizeVariant& rows,
                                    const PrefillShape& shape);

}  // namespace kvq
