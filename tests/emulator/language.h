#pragma once

#include <emulator/device.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

/// CUDA C++ for a C++ compiler: included before every kernel. Only what kvq's kernels use.

// ---- 1. Words of the language ------------------------------------------------------------------------------------

// From here on this is device code; above, the toolkit's headers were read as for the host.
#define __CUDA_ARCH__ KVQ_EMULATED_ARCH
#if KVQ_EMULATED_ARCH == 900
#define __CUDA_ARCH_FEAT_SM90_ALL
#endif
#undef __shared__
#define __shared__ thread_local  // compiled with -femulated-tls: runtime_api.cpp provides the addresses
#undef __maxnreg__
#define __maxnreg__(count)
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __forceinline__
#define __forceinline__ inline
#undef __noinline__
#define __noinline__

#define cudaLaunchKernelEx ::kvq::emulator::launch_kernel

template <typename T>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, T* kernel) {
  return ::cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}
template <typename T>
cudaError_t cudaFuncSetAttribute(T* kernel, cudaFuncAttribute attribute, int value) {
  return ::cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
template <typename T>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, T* kernel, int threads, std::size_t bytes) {
  return ::cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, reinterpret_cast<const void*>(kernel), threads, bytes);
}

// ---- 2. Collectives ----------------------------------------------------------------------------------------------

namespace kvq::emulator {

/// Each lane of the mask passes a T; `change` modifies the values of all lanes, then each lane gets its own back.
template <typename T, typename Change>
T exchange(const char* what, unsigned mask, T mine, Change) {
  meet_warp(what, mask, &mine, [](void* const(&lanes)[kWarpThreads]) {
    T* all[kWarpThreads];
    for (int i = 0; i < kWarpThreads; ++i) all[i] = static_cast<T*>(lanes[i]);
    Change{}(all);
  });
  return mine;
}

template <typename T>
struct Sent {
  T value;
  int from;  ///< source lane; the lane itself if there is no source
};
template <typename T>
T shuffle(const char* what, unsigned mask, T value, int from) {
  return exchange(what, mask, Sent<T>{value, from},
                  [](Sent<T>*(&all)[kWarpThreads]) {
                    T values[kWarpThreads];
                    for (int i = 0; i < kWarpThreads; ++i)
                      if (all[i]) values[i] = all[i]->value;
                    for (Sent<T>* lane : all) {
                      if (!lane) continue;
                      if (!all[lane->from]) fail("shuffle from lane %d, which is not in the mask", lane->from);
                      lane->value = values[lane->from];
                    }
                  })
      .value;
}

}  // namespace kvq::emulator

template <typename T>
T __shfl_sync(unsigned mask, T value, int from) {
  return kvq::emulator::shuffle("__shfl_sync", mask, value, from & 31);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int with) {
  return kvq::emulator::shuffle("__shfl_xor_sync", mask, value, (kvq::emulator::lane() ^ with) & 31);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  const int lane = kvq::emulator::lane(), from = lane - static_cast<int>(by);
  return kvq::emulator::shuffle("__shfl_up_sync", mask, value, from < 0 ? lane : from);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return kvq::emulator::exchange("vote", mask, predicate ? 1u : 0u, [](unsigned*(&all)[32]) {
    unsigned votes = 0;
    for (int i = 0; i < 32; ++i)
      if (all[i] && *all[i]) votes |= 1u << i;
    for (unsigned* lane : all)
      if (lane) *lane = votes;
  });
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
template <typename T>
T __reduce_add_sync(unsigned mask, T value) {
  return kvq::emulator::exchange("__reduce_add_sync", mask, value, [](T*(&all)[32]) {
    T sum = 0;
    for (T* lane : all)
      if (lane) sum += *lane;
    for (T* lane : all)
      if (lane) *lane = sum;
  });
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
  kvq::emulator::exchange("__syncwarp", mask, 0, [](int*(&)[32]) {});
}
inline void __syncthreads() { kvq::emulator::block_barrier(0, 0, true); }
inline int __syncthreads_or(int predicate) { return kvq::emulator::block_barrier(0, 0, true, predicate != 0); }

// ---- 3. Memory ---------------------------------------------------------------------------------------------------

template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T atomicAdd(T* to, T value) {
  const T before = *to;
  *to += value;
  return before;
}
template <typename T>
T atomicExch(T* to, T value) {
  return std::exchange(*to, value);
}
template <typename T>
T atomicCAS(T* to, T expected, T value) {
  const T before = *to;
  if (before == expected) *to = value;
  return before;
}
inline void __threadfence() {}
inline std::size_t __cvta_generic_to_shared(const void* pointer) {
  const std::ptrdiff_t at = static_cast<const std::byte*>(pointer) - kvq::emulator::shared_window();
  if (at < 0 || at >= static_cast<std::ptrdiff_t>(kvq::emulator::kSharedBytes))
    kvq::emulator::fail("an address outside of the block's shared memory is taken for one of it");
  return static_cast<std::size_t>(at);
}
inline void __nanosleep(unsigned) { kvq::emulator::pause(); }

// ---- 4. Numbers --------------------------------------------------------------------------------------------------

using std::abs;
using std::max;
using std::min;
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x ? std::countr_zero(static_cast<unsigned>(x)) + 1 : 0; }
inline unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= (x >> i & 1) << (31 - i);
  return result;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t both = std::uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned choice = selector >> (4 * i) & 15;
    unsigned byte = static_cast<unsigned>(both >> (8 * (choice & 7))) & 0xFF;
    if (choice & 8) byte = byte & 0x80 ? 0xFF : 0;
    result |= byte << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((std::uint64_t{high} << 32 | low) << (by & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}
/// Results in halves of words wrap around. @param f  (half of a, half of b)
template <typename F>
unsigned of_halves(unsigned a, unsigned b, F f) {
  const auto half = [](int x) { return static_cast<unsigned>(x) & 0xFFFFu; };
  return half(f(static_cast<std::int16_t>(a), static_cast<std::int16_t>(b))) |
         half(f(static_cast<std::int16_t>(a >> 16), static_cast<std::int16_t>(b >> 16))) << 16;
}
inline unsigned __vadd2(unsigned a, unsigned b) {
  return of_halves(a, b, [](int x, int y) { return x + y; });
}
inline unsigned __vsub2(unsigned a, unsigned b) {
  return of_halves(a, b, [](int x, int y) { return x - y; });
}
inline unsigned __viaddmin_u16x2(unsigned a, unsigned b, unsigned c) {
  return of_halves(__vadd2(a, b), c, [](int x, int y) { return std::min(x & 0xFFFF, y & 0xFFFF); });
}
inline int __dp2a_lo(int a, int b, int c) {
  return c + static_cast<std::int16_t>(a) * static_cast<std::int8_t>(b) + (a >> 16) * static_cast<std::int8_t>(b >> 8);
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += static_cast<std::int8_t>(a >> (8 * i)) * static_cast<std::int8_t>(b >> (8 * i));
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; ++i) c += (a >> (8 * i) & 0xFF) * (b >> (8 * i) & 0xFF);
  return c;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __saturatef(float x) { return x > 0.0f ? std::min(x, 1.0f) : 0.0f; }  // a NaN gives zero
inline int __float2int_rn(float x) {
  if (std::isnan(x)) return 0;
  return static_cast<int>(std::clamp(std::nearbyint(static_cast<double>(x)), -2147483648.0, 2147483647.0));
}
inline unsigned __float2uint_rz(float x) {
  if (std::isnan(x)) return 0;
  return static_cast<unsigned>(std::clamp(std::trunc(static_cast<double>(x)), 0.0, 4294967295.0));
}
float __fadd_rd(float a, float b);
float __fmaf_rd(float a, float b, float c);
float __double2float_ru(double x);
