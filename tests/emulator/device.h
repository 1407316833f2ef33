#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>

/// A CUDA device of which every thread runs on the CPU, one at a time, in an order that a seed decides: kernels are
/// compiled as C++ (language.h) and launched by the same host code as on a GPU (runtime_api.cpp).
///
/// What it keeps of a GPU is what programs may rely on, and no more. Lanes of a warp go on by themselves from one
/// collective to the next; warps, blocks and kernels that may overlap take turns at random; copies by copy engines land
/// late and in any order, and what they will overwrite is spoilt at once; shared memory begins with garbage. So a
/// missing barrier, a barrier of a wrong count or parity, or a copy that nobody waits for shows as a wrong result, as a
/// deadlock, which is reported, or as a broken rule, likewise.
///
/// It says nothing about time; memory keeps order here, so that a missing fence does not show; warpgroup products are
/// done when they are begun; and registers do not limit how many blocks a multiprocessor takes.

// Of the thread that runs.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace kvq::emulator {

constexpr int kWarpThreads = 32;
constexpr std::size_t kSharedBytes = 256 * 1024;  ///< of a block's window, not of what it may have

/// Ends the program: what went wrong, and in which thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- Of the thread that runs ------------------------------------------------------------------------------------

/// The start of the block's shared memory, kSharedBytes, aligned to as much.
std::byte* shared_window();

/// Lets others run; comes back later.
void pause();

/// Each lane of `mask` gives the address of what it brings; the last one of them has `finish` called with all of them
/// and then all go on.
/// @param what  of the collective: all must have come to the same one
void meet_warp(const char* what, unsigned mask, void* mine, void (*finish)(void* const (&)[kWarpThreads]));
/// The same of a warpgroup, four warps: 128 lanes.
void meet_warpgroup(const char* what, void* mine, void (*finish)(void* const (&)[4 * kWarpThreads]));
int lane();

/// Barrier `name`, 0 to 15, of `threads` threads of the block, 0 for all. @return whether any came with `vote`
bool block_barrier(int name, int threads, bool waits, bool vote = false);

// Barriers in shared memory.
void mbarrier_init(std::uint32_t address, std::uint32_t count);
void mbarrier_arrive(std::uint32_t address, std::uint32_t expected_bytes = 0);
void mbarrier_wait(std::uint32_t address, std::uint32_t parity);

// Copies into shared memory by others than this thread.
void bulk_copy(std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t barrier);
void thread_copy(std::uint32_t to, const void* from, std::uint32_t bytes);
void thread_copy_commit();
void thread_copy_wait(int pending_groups);
void thread_copy_arrive(std::uint32_t barrier);

void launch_dependents();
void wait_for_kernels_before();

// ---- For the host -----------------------------------------------------------------------------------------------

/// Decides every order from now on.
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
