#include <kvq/runtime/kernels/copy/params.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/common/fault.cuh>

#include <cuda_runtime.h>

namespace kvq {

namespace copy {

constexpr int kThreads = 256, kVectors = 8, kBlockBytes = kThreads * kVectors * 16;

/// Number of an entry in the pool, -1 to skip it.
__device__ __forceinline__ std::int64_t entry_of(const CopyParams& p, const std::int32_t* entries, int i) {
  const int entry = entries[i];
  if (entry < p.num_entries) return entry < 0 ? -1 : entry;
  record_fault(p.faults, {p.fault_code, entry}, i, -1);
  return -1;
}

/// Where an entry's bytes of one layer lie.
__device__ __forceinline__ std::byte* place_of(const CopyParams& p, const CopyLayer& layer, std::int64_t entry,
                                               bool in_pool) {
  return in_pool ? layer.pool + entry * layer.stride : p.buffer + entry * p.buffer_bytes + layer.buffer_offset;
}

__device__ __forceinline__ void copy_state(const CopyParams& p, int i, std::int64_t from, std::int64_t to) {
  const auto state_of = [&](std::int64_t entry, bool in_pool) {
    return in_pool ? p.ring_states + entry
                   : reinterpret_cast<RingState*>(p.buffer + (entry + 1) * p.buffer_bytes - sizeof(RingState));
  };
  RingState state = *state_of(from, p.from != nullptr);
  if (p.sequence_ids) state.owner = p.sequence_ids[i];
  *state_of(to, p.to != nullptr) = state;
}

/// Grid: blocks of each layer's entry, one after the other, of each layer, of each entry.
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ CopyParams p, int layer_blocks) {
  const int block = static_cast<int>(blockIdx.x), part = block % layer_blocks, rest = block / layer_blocks;
  const int i = rest / p.num_layers;
  const CopyLayer layer = p.layers[rest % p.num_layers];
  const std::int64_t from = p.from ? entry_of(p, p.from, i) : i, to = p.to ? entry_of(p, p.to, i) : i;
  if (from < 0 || to < 0) return;
  if (p.ring_states && part == 0 && rest % p.num_layers == 0 && threadIdx.x == 0) copy_state(p, i, from, to);
  const std::byte* source = place_of(p, layer, from, p.from != nullptr);
  std::byte* destination = place_of(p, layer, to, p.to != nullptr);
  const std::int64_t first = std::int64_t{part} * kBlockBytes + static_cast<std::int64_t>(threadIdx.x) * 16;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t at = first + v * kThreads * 16;
    if (at < layer.bytes) *reinterpret_cast<uint4*>(destination + at) = *reinterpret_cast<const uint4*>(source + at);
  }
}

}  // namespace copy

Status load_copy() { return cuda_status(load_kernel(copy::copy_kernel), "copy: load"); }

Status check_copy(const CopyParams& p) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (p.count < 0) return Status::fail(kBad, "copy: count is %d, expected 0 or more", p.count);
  if (p.count == 0) return {};
  if (!p.from && !p.to) return Status::fail(kBad, "copy: from and to are null, expected one of them at least");
  const auto misaligned = [](const void* pointer, std::uintptr_t to) {
    return reinterpret_cast<std::uintptr_t>(pointer) % to != 0;
  };
  if ((!p.from || !p.to) && (!p.buffer || misaligned(p.buffer, 16)))
    return Status::fail(kBad, "copy: buffer must not be null, aligned to 16 bytes");
  if (p.from && p.to && p.buffer) return Status::fail(kBad, "copy: a buffer beside from and to, expected null");
  if (misaligned(p.from, 4) || misaligned(p.to, 4) || misaligned(p.sequence_ids, 8))
    return Status::fail(kBad, "copy: from and to must be aligned to 4 bytes, sequence_ids to 8");
  if (p.sequence_ids && !p.ring_states) return Status::fail(kBad, "copy: sequence_ids go with rings, expected null");
  const std::int64_t blocks = (p.most_bytes + copy::kBlockBytes - 1) / copy::kBlockBytes * p.num_layers * p.count;
  if (blocks > 0x7FFFFFFF)
    return Status::fail(StatusCode::unsupported, "copy: %d entries of %d layers: more than one launch copies", p.count,
                        p.num_layers);
  return {};
}

Status run_copy(const CopyParams& p, CUstream_st* stream) {
  if (p.count == 0 || p.most_bytes == 0) return {};
  const auto layer_blocks = static_cast<int>((p.most_bytes + copy::kBlockBytes - 1) / copy::kBlockBytes);
  return cuda_status(
      launch_kernel(copy::copy_kernel, dim3(static_cast<unsigned>(layer_blocks * p.num_layers * p.count)),
                    copy::kThreads, 0, false, stream, p, layer_blocks),
      "copy: launch");
}

}  // namespace kvq
