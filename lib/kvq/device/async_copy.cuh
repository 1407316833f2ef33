#pragma once

#include <kvq/device/ptx.cuh>

#include <cstddef>

/// Asynchronous copies from global to shared memory that complete on an mbarrier. From architecture 9.0 on one lane
/// issues a bulk copy; before, all lanes of a warp copy 16 bytes each at a time. Addresses and sizes are multiples of
/// 16.
namespace kvq::async_copy {

using ptx::u32;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kBulk = false;
#else
constexpr bool kBulk = true;
#endif

/// Arrivals of a barrier that a warp's copies complete: without bulk copies, one of each lane and one of expect().
constexpr u32 kArrivals = kBulk ? 1 : 33;

/// Arrives on the barrier for copies of so many bytes. One lane calls it, before the copies.
__device__ __forceinline__ void expect(u32 barrier, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  ptx::mbarrier_arrive(barrier);
#else
  ptx::mbarrier_arrive_expect_tx(barrier, static_cast<u32>(bytes));
#endif
}

/// Starts a copy of data that is read once: its lines are the first to be evicted from L2. One lane calls it if kBulk,
/// else all lanes.
__device__ __forceinline__ void start_evict_first(void* to, const void* from, int bytes, u32 barrier, int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  for (int i = lane * 16; i < bytes; i += 512)
    ptx::cp_async_16(ptx::shared_address(to) + static_cast<u32>(i), static_cast<const std::byte*>(from) + i);
#else
  ptx::cp_async_bulk_evict_first(ptx::shared_address(to), from, static_cast<u32>(bytes), barrier);
#endif
}

/// Arrives on the barrier when this lane's copies so far are complete. All lanes call it after the copies; bulk copies
/// need no call.
__device__ __forceinline__ void finish(u32 barrier) {
  if constexpr (!kBulk) ptx::cp_async_mbarrier_arrive_noinc(barrier);
}

/// One whole copy: expect(), the copy and finish(). All lanes of a warp call it.
__device__ __forceinline__ void copy(void* to, const void* from, int bytes, u32 barrier, int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if (lane == 0) expect(barrier, bytes);
  start_evict_first(to, from, bytes, barrier, lane);
  finish(barrier);
#else
  if (lane == 0) {
    expect(barrier, bytes);
    ptx::cp_async_bulk(ptx::shared_address(to), from, static_cast<u32>(bytes), barrier);
  }
  __syncwarp();
#endif
}

}  // namespace kvq::async_copy
