#pragma once

#include <kvq/device/ptx.cuh>

/// Products by a warpgroup, 128 threads: the tensor cores of architecture 90a read their operands from shared memory.
///
/// Operands lie there in *panels*, the 128-byte swizzle: rows of 64 channels of two bytes, 128 bytes a row, eight rows
/// after each other. The 16-byte chunks of a row are permuted: chunk c of row r is at c xor (r mod 8). Panels begin at
/// multiples of 1024 bytes.
namespace kvq::ptx {

using u64 = std::uint64_t;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// Matrix descriptor of an operand that begins at a row of a panel, a multiple of eight. The next eight rows are 1024
/// bytes further.
/// @param panel_bytes  from one 64 channels to the next: for operands whose channels are the columns of the product
__device__ __forceinline__ u64 wgmma_panel(u32 address, int panel_bytes) {
  constexpr u64 kSwizzle128 = u64{1} << 62, kEightRows = u64{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | static_cast<u64>(panel_bytes >> 4) << 16 | (address & 0x3FFFF) >> 4;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most `kPending` groups are incomplete.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Compiler barrier: no use of these accumulators moves across.
template <int kCount>
__device__ __forceinline__ void pin(float (&c)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Lists of accumulators for the assembler: operands %0, %1, ...
#define KVQ_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define KVQ_NAMES_32                                                                                               \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31"
#define KVQ_NAMES_64                                                                                                  \
  KVQ_NAMES_32                                                                                                        \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"
#define KVQ_NAMES_128                                                                                                 \
  KVQ_NAMES_64                                                                                                        \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91," \
  "%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,"  \
  "%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define KVQ_SUMS_8(d, i)                                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define KVQ_SUMS_16(d, i) KVQ_SUMS_8(d, i), KVQ_SUMS_8(d, i + 8)
#define KVQ_SUMS_32(d, i) KVQ_SUMS_8(d, i), KVQ_SUMS_8(d, i + 8), KVQ_SUMS_8(d, i + 16), KVQ_SUMS_8(d, i + 24)
#define KVQ_SUMS_64(d, i) KVQ_SUMS_32(d, i), KVQ_SUMS_32(d, i + 32)
#define KVQ_SUMS_128(d, i) KVQ_SUMS_64(d, i), KVQ_SUMS_64(d, i + 64)

// The two products for N columns and COUNT = N / 2 accumulators; P0.. are the numbers of the other operands.
#define KVQ_WGMMA(N, COUNT, TYPE, NAME, P0, P1, P2, P3, P4, P5, P6)                                            \
  /* c = a b (+ c); a [64, 16] and b [N, 16] in panels. */                                                     \
  __device__ __forceinline__ void wgmma_m64k16_##NAME(float(&c)[COUNT], u64 a, u64 b, int add) {               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P2                                                       \
                 ", 0;\n"                                                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" KVQ_NAMES_##COUNT        \
                 "}, %" P0 ", %" P1 ", p, 1, 1, 0, 0;\n}"                                                      \
                 : KVQ_SUMS_##COUNT(c, 0)                                                                      \
                 : "l"(a), "l"(b), "r"(add)                                                                    \
                 : "memory");                                                                                  \
  }                                                                                                            \
  /* c = a b (+ c); a [64, 16] in registers, b [16, N] in panels: its columns are channels; its rows if not    \
   * transposed. */                                                                                            \
  template <int kTransposed = 1>                                                                               \
  __device__ __forceinline__ void wgmma_m64k16_##NAME(float(&c)[COUNT], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, \
                                                      int add) {                                               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P5                                                       \
                 ", 0;\n"                                                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" KVQ_NAMES_##COUNT        \
                 "}, {%" P0 ", %" P1 ", %" P2 ", %" P3 "}, %" P4 ", p, 1, 1, %" P6 ";\n}"                      \
                 : KVQ_SUMS_##COUNT(c, 0)                                                                      \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add), "n"(kTransposed)                      \
                 : "memory");                                                                                  \
  }
#define KVQ_WGMMA_TYPES(N, COUNT, P0, P1, P2, P3, P4, P5, P6)   \
  KVQ_WGMMA(N, COUNT, "bf16", bf16, P0, P1, P2, P3, P4, P5, P6) \
  KVQ_WGMMA(N, COUNT, "f16", fp16, P0, P1, P2, P3, P4, P5, P6)

KVQ_WGMMA_TYPES(32, 16, "16", "17", "18", "19", "20", "21", "22")
KVQ_WGMMA_TYPES(64, 32, "32", "33", "34", "35", "36", "37", "38")
KVQ_WGMMA_TYPES(128, 64, "64", "65", "66", "67", "68", "69", "70")
KVQ_WGMMA_TYPES(256, 128, "128", "129", "130", "131", "132", "133", "134")

#undef KVQ_WGMMA_TYPES
#undef KVQ_WGMMA
#undef KVQ_SUMS_128
#undef KVQ_SUMS_64
#undef KVQ_SUMS_32
#undef KVQ_SUMS_16
#undef KVQ_SUMS_8
#undef KVQ_NAMES_128
#undef KVQ_NAMES_64
#undef KVQ_NAMES_32
#undef KVQ_NAMES_16

#endif

}  // namespace kvq::ptx
