#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

/// One function for each PTX instruction that kvq's kernels use, named after it.
namespace kvq::ptx {

using u32 = std::uint32_t;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

/// (a & mask) | (b & ~mask), in one instruction.
__device__ __forceinline__ u32 lop3_select(u32 mask, u32 a, u32 b) {
  u32 c;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(c) : "r"(mask), "r"(a), "r"(b));
  return c;
}
/// a & (b ^ c)
__device__ __forceinline__ u32 lop3_and_xor(u32 a, u32 b, u32 c) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0x60;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

/// Byte i of the result is byte n of the eight of `a`, then `b`, with n in bits 4 i .. 4 i + 2 of `selector`, i = 0..3.
/// Bit 3 of these nibbles must be 0.
__device__ __forceinline__ u32 select_bytes(u32 a, u32 b, u32 selector) {
  u32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
  return bytes;
}

/// c += a b; a [16, 32] unsigned bytes, b [32, 8] signed bytes.
__device__ __forceinline__ void mma_m16n8k32_u8s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// c += a b; a [16, 32] and b [32, 8] unsigned bytes.
__device__ __forceinline__ void mma_m16n8k32_u8u8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// c += a b; a [16, 32] signed bytes, b [32, 8] unsigned bytes.
__device__ __forceinline__ void mma_m16n8k32_s8u8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// c += a b; a [16, 32] and b [32, 8] signed bytes.
__device__ __forceinline__ void mma_m16n8k32_s8s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// c += a b; a [16, 16] and b [16, 8] signed bytes.
__device__ __forceinline__ void mma_m16n8k16_s8s8(int (&c)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

/// c += the bits that are set in both; a [16, 256] and b [256, 8] bits.
__device__ __forceinline__ void mma_m16n8k256_b1(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// Likewise; a [16, 128] and b [128, 8] bits.
__device__ __forceinline__ void mma_m16n8k128_b1(int (&c)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

/// c += a b; a [16, 16] and b [16, 8] bfloat16.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// Two floats as bfloat16, x in the low half.
__device__ __forceinline__ u32 pack_bf16(float x, float y) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}

/// c += a b; a [16, 16] and b [16, 8] fp16.
__device__ __forceinline__ void mma_m16n8k16_fp16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// c += a b; a [16, 8] and b [8, 8] bfloat16.
__device__ __forceinline__ void mma_m16n8k8_bf16(float (&c)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

/// Two words from shared memory, by one load that stays a load of two.
__device__ __forceinline__ void ld_shared_v2(u32 address, u32& x, u32& y) {
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x), "=r"(y) : "r"(address) : "memory");
}

/// Four words from shared memory, as ld_shared_v2().
__device__ __forceinline__ void ld_shared_v4(u32 address, u32& x, u32& y, u32& z, u32& w) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "r"(address));
}

/// A word from shared memory, as ld_shared_v4().
__device__ __forceinline__ u32 ld_shared(u32 address) {
  u32 x;
  asm("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address));
  return x;
}

__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// Transposes an 8 x 8 matrix of 16-bit elements: lane 4 g + t gives row g, columns 2 t and 2 t + 1, and gets column g.
__device__ __forceinline__ u32 movmatrix_trans(u32 x) {
  u32 y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Base-2 logarithm; subnormal numbers count as zeros.
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// a b, all 64 bits.
__device__ __forceinline__ std::uint64_t mul_wide(u32 a, u32 b) { return std::uint64_t{a} * b; }

/// Returns x, but the compiler must assume another number at each call. So it recomputes values that are derived from x
/// instead of keeping them in registers.
__device__ __forceinline__ int derive_again(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// Returns x, as a number of its own to the compiler: products whose operands are copies share one set of registers,
/// where the compiler would move the words for each product. Takes a multiplication, which the other pipe has time for.
/// Blocks have one dimension.
__device__ __forceinline__ u32 copied(u32 x) { return x * blockDim.y; }

/// Keeps the branch that this stands in: the compiler must not turn the branch into selects.
__device__ __forceinline__ void keep_branch() { asm volatile("" ::: "memory"); }

/// Reads a word of each line of a kernel's parameters, all at once, so that they are in the constant cache. Else a
/// kernel that starts waits for one line after the other, where it first reads them.
template <typename Params>
__device__ __forceinline__ void fetch_params(const Params& params) {
  constexpr int kLine = 64 / 4, kWords = sizeof(Params) / 4;
  const unsigned* words = reinterpret_cast<const unsigned*>(&params);
  unsigned all = words[kWords - 1];
#pragma unroll
  for (int i = 0; i < kWords; i += kLine) all ^= words[i];
  // A use of the words, without which they would not be read. Whether it sleeps does not matter.
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x9e3779b9; @p nanosleep.u32 0; }" ::"r"(all));
}

/// 1 / x; subnormal numbers count as zeros.
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / sqrt(x), likewise.
__device__ __forceinline__ float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// sqrt(x), likewise.
__device__ __forceinline__ float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
/// Arrives kCount times.
template <int kCount>
__device__ __forceinline__ void mbarrier_arrive_times(u32 barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#pragma unroll
  for (int i = 0; i < kCount; ++i) mbarrier_arrive(barrier);
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(kCount) : "memory");
#endif
}
/// Waits until the barrier phase of this parity is complete.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra wait;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}
/// Lets the next kernel of the stream start if it was launched with overlap; it starts once a thread of every block has
/// called this or every block has exited.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// If this kernel was launched with overlap, waits until the kernel before has ended and its writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Makes initialized barriers visible to the async proxy; before architecture 9.0 there is none.
__device__ __forceinline__ void fence_mbarrier_init() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
/// Makes this thread's earlier stores to shared memory visible to the async proxy, bulk copies and wgmma; likewise.
__device__ __forceinline__ void fence_proxy_async() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Bulk copy of 16-byte aligned global memory into shared memory; counts its bytes on the barrier.
__device__ __forceinline__ void cp_async_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
               : "memory");
}
/// The same for data that is read once: its lines are the first to be evicted from L2.
__device__ __forceinline__ void cp_async_bulk_evict_first(u32 to, const void* from, u32 bytes, u32 barrier) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
#endif

/// Adds to a counter with release semantics: a thread that acquires the sum sees what this thread has written, and what
/// it has acquired at barriers.
__device__ __forceinline__ void red_release_add(unsigned long long* counter, unsigned long long value) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(counter)), "l"(value)
               : "memory");
}
__device__ __forceinline__ unsigned long long ld_acquire(const unsigned long long* counter) {
  unsigned long long value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(counter)) : "memory");
  return value;
}

/// Prefetches the 128 bytes around the address into L2.
__device__ __forceinline__ void prefetch_l2(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(pointer)));
}

/// Starts a copy of 16 bytes to shared memory. L2 prefetches all 128 bytes around them, because callers copy
/// neighboring bytes, too.
__device__ __forceinline__ void cp_async_16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from))
               : "memory");
}
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most `kPending` of this thread's groups of copies are incomplete.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
/// Waits for all copies of this thread.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
/// Arrives on the barrier when this thread's copies so far are complete, without raising its pending count.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

/// Barrier `name` (1..15) of `threads` threads of the block.
__device__ __forceinline__ void bar_sync(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
/// Arrives on a barrier without waiting for the others.
__device__ __forceinline__ void bar_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

}  // namespace kvq::ptx
