#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>

/// An emulated CUDA device. All its threads run on the CPU, one at a time, in an order that a seed decides. Kernels are
/// compiled as C++ (language.h) and launched by the same host code as on a GPU (runtime_api.cpp).
///
/// The emulated device guarantees what CUDA guarantees to programs, and no more. Lanes of a warp run independently from
/// one collective to the next; warps, blocks and overlapping kernels take turns at random; asynchronous copies complete
/// late and in any order, and their destination is overwritten with garbage at once; shared memory begins with garbage.
/// So a missing barrier, a wrong count or phase of a barrier, or a missing wait for a copy shows as a wrong result, or
/// is reported as a deadlock or as a broken rule.
///
/// Not emulated: time; weak memory order, so missing fences do not show; asynchronous warpgroup products, which
/// complete at once; and registers as a limit on resident blocks.

// The running thread's.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace kvq::emulator {

constexpr int kWarpThreads = 32;
constexpr std::size_t kSharedBytes = 256 * 1024;  ///< address range of a block's shared memory; kernels may use less

/// Ends the program with a message that includes the running thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- For the running thread -------------------------------------------------------------------------------------

/// The start of the block's shared memory, kSharedBytes, aligned to as much.
std::byte* shared_window();

/// Lets other threads run.
void pause();

/// A collective: each lane of `mask` passes the address of its operand; the last lane to arrive calls `finish` with the
/// addresses of all, and then all lanes continue.
/// @param what  name of the collective; it must be the same for all lanes
void meet_warp(const char* what, unsigned mask, void* mine, void (*finish)(void* const (&)[kWarpThreads]));
/// The same for a warpgroup: four warps, 128 lanes.
void meet_warpgroup(const char* what, void* mine, void (*finish)(void* const (&)[4 * kWarpThreads]));
int lane();

/// Barrier `name`, 0 to 15, of `threads` threads of the block, 0 for all. @return whether any thread passed `vote`
bool block_barrier(int name, int threads, bool waits, bool vote = false);

// Barriers in shared memory.
void mbarrier_init(std::uint32_t address, std::uint32_t count);
void mbarrier_arrive(std::uint32_t address, std::uint32_t expected_bytes = 0);
void mbarrier_wait(std::uint32_t address, std::uint32_t parity);

// Asynchronous copies to shared memory.
void bulk_copy(std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t barrier);
void thread_copy(std::uint32_t to, const void* from, std::uint32_t bytes);
void thread_copy_commit();
void thread_copy_wait(int pending_groups);
void thread_copy_arrive(std::uint32_t barrier);

void launch_dependents();
void wait_for_kernels_before();

// ---- For the host -----------------------------------------------------------------------------------------------

/// Seeds the generator that decides all orders from now on.
void set_seed(std::uint64_t seed);

struct Launch {
  dim3 grid, block;
  std::size_t shared_bytes = 0;
  bool overlaps = false;
  std::function<void()> thread;  ///< the kernel with its arguments
};
cudaError_t launch(cudaStream_t stream, Launch launch);

template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  Launch made{config->gridDim, config->blockDim, config->dynamicSmemBytes, false, {}};
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
      made.overlaps = config->attrs[i].val.programmaticStreamSerializationAllowed != 0;
  made.thread = [=] { kernel(arguments...); };
  return launch(config->stream, std::move(made));
}

}  // namespace kvq::emulator
