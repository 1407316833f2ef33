#pragma once

#include <emulator/language.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

/// Replaces lib/kvq/device/ptx.cuh: the effects of its instructions on an emulated device.
namespace kvq::ptx {

using u32 = std::uint32_t;

inline u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }
inline std::byte* shared_at(u32 address, u32 alignment) {
  if (address % alignment) emulator::fail("shared memory: address %u is no multiple of %u", address, alignment);
  if (address >= emulator::kSharedBytes) emulator::fail("shared memory: address %u is not in there", address);
  return emulator::shared_window() + address;
}

inline u32 lop3_select(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }
/// With bit 3 of a nibble, as the instruction has it, the byte's highest bit fills the byte.
inline u32 select_bytes(u32 a, u32 b, u32 selector) {
  const std::uint64_t all = std::uint64_t{b} << 32 | a;
  u32 bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 byte = static_cast<u32>(all >> 8 * (selector >> 4 * i & 7)) & 0xFF;
    bytes |= (selector >> 4 * i & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << 8 * i;
  }
  return bytes;
}
inline u32 lop3_and_xor(u32 a, u32 b, u32 c) { return a & (b ^ c); }

// ---- Products ----------------------------------------------------------------------------------------------------

/// Operands of lane 4 g + t in a product of a warp, a [16, k], b [k, 8] and c [16, 8]. Of a it holds rows g and g + 8,
/// of b column g: words of n elements, word t of the first half of the channels and word t of the second half. Of c it
/// holds rows g and g + 8, columns 2 t and 2 t + 1.
template <typename Sum>
struct ProductLane {
  Sum* c;
  u32 a[4], b[2];
};

/// @param read_a, read_b  element `i` of a word, as a number
template <int kInWord, int kHalves, typename Number, typename Sum, typename ReadA, typename ReadB>
void multiply(ProductLane<Sum>* const (&lanes)[32], ReadA read_a, ReadB read_b) {
  constexpr int kHalf = 4 * kInWord, kDepth = kHalves * kHalf;
  Number a[16][kDepth], b[kDepth][8];
  for (int lane = 0; lane < 32; ++lane)
    for (int half = 0; half < kHalves; ++half)
      for (int i = 0; i < kInWord; ++i) {
        const int g = lane / 4, channel = half * kHalf + lane % 4 * kInWord + i;
        a[g][channel] = read_a(lanes[lane]->a[2 * half], i);
        a[g + 8][channel] = read_a(lanes[lane]->a[2 * half + 1], i);
        b[channel][g] = read_b(lanes[lane]->b[half], i);
      }
  for (int row = 0; row < 16; ++row) {
    Number sums[8] = {};
    for (int channel = 0; channel < kDepth; ++channel)
      for (int column = 0; column < 8; ++column) sums[column] += a[row][channel] * b[channel][column];
    for (int column = 0; column < 8; ++column) {
      Sum& c = lanes[row % 8 * 4 + column / 2]->c[row / 8 * 2 + column % 2];
      const Number sum = static_cast<Number>(c) + sums[column];
      c = static_cast<Sum>(sum);
      // Tensor cores truncate: long sums of products of one sign come out too small.
      if constexpr (std::is_same_v<Sum, float>)
        if (std::fabs(static_cast<double>(c)) > std::fabs(sum)) c = std::nextafter(c, 0.0f);
    }
  }
}

inline int unsigned_byte(u32 word, int i) { return static_cast<int>(word >> (8 * i) & 0xFF); }
inline int signed_byte(u32 word, int i) { return static_cast<std::int8_t>(word >> (8 * i)); }
inline int bit_of(u32 word, int i) { return static_cast<int>(word >> i & 1); }
inline double bfloat_half(u32 word, int i) {
  return static_cast<double>(__uint_as_float(i ? word & 0xFFFF0000u : word << 16));
}
inline double fp16_half(u32 word, int i) {
  return static_cast<double>(__half2float(__ushort_as_half(static_cast<unsigned short>(word >> (16 * i)))));
}

inline void mma_m16n8k32_u8s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emulator::exchange("mma u8 s8", ~0u, ProductLane<int>{c, {a0, a1, a2, a3}, {b0, b1}},
                     [](ProductLane<int>*(&lanes)[32]) { multiply<4, 2, int>(lanes, unsigned_byte, signed_byte); });
}
inline void mma_m16n8k32_u8u8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emulator::exchange("mma u8 u8", ~0u, ProductLane<int>{c, {a0, a1, a2, a3}, {b0, b1}},
                     [](ProductLane<int>*(&lanes)[32]) { multiply<4, 2, int>(lanes, unsigned_byte, unsigned_byte); });
}
inline void mma_m16n8k32_s8u8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emulator::exchange("mma s8 u8", ~0u, ProductLane<int>{c, {a0, a1, a2, a3}, {b0, b1}},
                     [](ProductLane<int>*(&lanes)[32]) { multiply<4, 2, int>(lanes, signed_byte, unsigned_byte); });
}
inline void mma_m16n8k32_s8s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emulator::exchange("mma s8 s8", ~0u, ProductLane<int>{c, {a0, a1, a2, a3}, {b0, b1}},
                     [](ProductLane<int>*(&lanes)[32]) { multiply<4, 2, int>(lanes, signed_byte, signed_byte); });
}
inline void mma_m16n8k16_s8s8(int (&c)[4], u32 a0, u32 a1, u32 b0) {
  emulator::exchange("mma s8 s8 k16", ~0u, ProductLane<int>{c, {a0, a1, 0, 0}, {b0, 0}},
                     [](ProductLane<int>*(&lanes)[32]) { multiply<4, 1, int>(lanes, signed_byte, signed_byte); });
}
inline void mma_m16n8k256_b1(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emulator::exchange("mma b1 k256", ~0u, ProductLane<int>{c, {a0, a1, a2, a3}, {b0, b1}},
                     [](ProductLane<int>*(&lanes)[32]) { multiply<32, 2, int>(lanes, bit_of, bit_of); });
}
inline void mma_m16n8k128_b1(int (&c)[4], u32 a0, u32 a1, u32 b0) {
  emulator::exchange("mma b1 k128", ~0u, ProductLane<int>{c, {a0, a1, 0, 0}, {b0, 0}},
                     [](ProductLane<int>*(&lanes)[32]) { multiply<32, 1, int>(lanes, bit_of, bit_of); });
}
inline void mma_m16n8k16_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emulator::exchange("mma bf16", ~0u, ProductLane<float>{c, {a0, a1, a2, a3}, {b0, b1}},
                     [](ProductLane<float>*(&lanes)[32]) { multiply<2, 2, double>(lanes, bfloat_half, bfloat_half); });
}
inline void mma_m16n8k16_fp16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emulator::exchange("mma fp16", ~0u, ProductLane<float>{c, {a0, a1, a2, a3}, {b0, b1}},
                     [](ProductLane<float>*(&lanes)[32]) { multiply<2, 2, double>(lanes, fp16_half, fp16_half); });
}
inline void mma_m16n8k8_bf16(float (&c)[4], u32 a0, u32 a1, u32 b0) {
  emulator::exchange("mma bf16 k8", ~0u, ProductLane<float>{c, {a0, a1, 0, 0}, {b0, 0}},
                     [](ProductLane<float>*(&lanes)[32]) { multiply<2, 1, double>(lanes, bfloat_half, bfloat_half); });
}

inline u32 pack_bf16(float x, float y) {
  const u32 low = __bfloat16_as_ushort(__float2bfloat16_rn(x)), high = __bfloat16_as_ushort(__float2bfloat16_rn(y));
  return low | high << 16;
}

// ---- Fragments ---------------------------------------------------------------------------------------------------

inline void ld_shared_v2(u32 address, u32& x, u32& y) {
  const std::byte* from = shared_at(address, 8);
  std::memcpy(&x, from, 4), std::memcpy(&y, from + 4, 4);
}

inline void ld_shared_v4(u32 address, u32& x, u32& y, u32& z, u32& w) {
  const std::byte* from = shared_at(address, 16);
  std::memcpy(&x, from, 4), std::memcpy(&y, from + 4, 4), std::memcpy(&z, from + 8, 4), std::memcpy(&w, from + 12, 4);
}

inline u32 ld_shared(u32 address) {
  u32 x;
  std::memcpy(&x, shared_at(address, 4), 4);
  return x;
}

struct MatrixLane {
  u32 address;
  u32* r;
};
/// Lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i; lane 4 g + t gets row g, columns 2 t and 2 t + 1,
/// or, if transposed, column g, rows 2 t and 2 t + 1.
template <bool kTransposed>
void load_matrices(u32 (&r)[4], u32 address) {
  emulator::exchange(kTransposed ? "ldmatrix.trans" : "ldmatrix", ~0u, MatrixLane{address, r},
                     [](MatrixLane*(&lanes)[32]) {
                       for (int i = 0; i < 4; ++i) {
                         unsigned short rows[8][8];
                         for (int row = 0; row < 8; ++row)
                           std::memcpy(rows[row], shared_at(lanes[8 * i + row]->address, 16), 16);
                         for (int lane = 0; lane < 32; ++lane) {
                           const int g = lane / 4, t = lane % 4;
                           const u32 low = kTransposed ? rows[2 * t][g] : rows[g][2 * t],
                                     high = kTransposed ? rows[2 * t + 1][g] : rows[g][2 * t + 1];
                           lanes[lane]->r[i] = low | high << 16;
                         }
                       }
                     });
}
inline void ldmatrix_x4(u32 (&r)[4], u32 address) { load_matrices<false>(r, address); }
inline void ldmatrix_x4_trans(u32 (&r)[4], u32 address) { load_matrices<true>(r, address); }
inline u32 movmatrix_trans(u32 x) {
  return emulator::exchange("movmatrix", ~0u, x, [](u32*(&lanes)[32]) {
    u32 rows[8][8];
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 2; ++i) rows[lane / 4][lane % 4 * 2 + i] = *lanes[lane] >> (16 * i) & 0xFFFF;
    for (int lane = 0; lane < 32; ++lane)
      *lanes[lane] = rows[lane % 4 * 2][lane / 4] | rows[lane % 4 * 2 + 1][lane / 4] << 16;
  });
}

// ---- Approximations ----------------------------------------------------------------------------------------------

/// Flushes subnormal numbers to zero.
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
inline float lg2(float x) { return std::log2(flushed(x)); }
inline float ex2(float x) { return flushed(std::exp2(flushed(x))); }
inline float rcp_approx(float x) { return flushed(1.0f / flushed(x)); }
inline float rsqrt_approx(float x) { return 1.0f / std::sqrt(flushed(x)); }
inline float sqrt_approx(float x) { return std::sqrt(flushed(x)); }
inline int derive_again(int x) { return x; }
inline u32 copied(u32 x) { return x; }
inline void keep_branch() {}
template <typename Params>
void fetch_params(const Params&) {}
inline std::uint64_t mul_wide(u32 a, u32 b) { return std::uint64_t{a} * b; }

// ---- Barriers and copies -----------------------------------------------------------------------------------------

inline void mbarrier_init(u32 barrier, u32 count) { emulator::mbarrier_init(barrier, count); }
inline void mbarrier_arrive(u32 barrier) { emulator::mbarrier_arrive(barrier); }
template <int kCount>
void mbarrier_arrive_times(u32 barrier) {
  for (int i = 0; i < kCount; ++i) mbarrier_arrive(barrier);
}
inline void mbarrier_wait(u32 barrier, u32 parity) { emulator::mbarrier_wait(barrier, parity); }
inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {}
#if __CUDA_ARCH__ >= 900
inline void griddepcontrol_launch_dependents() { emulator::launch_dependents(); }
inline void griddepcontrol_wait() { emulator::wait_for_kernels_before(); }
inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) { emulator::mbarrier_arrive(barrier, bytes); }
inline void cp_async_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  emulator::bulk_copy(to, from, bytes, barrier);
}
inline void cp_async_bulk_evict_first(u32 to, const void* from, u32 bytes, u32 barrier) {
  emulator::bulk_copy(to, from, bytes, barrier);
}
#else
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}
#endif

inline void red_release_add(unsigned long long* counter, unsigned long long value) { *counter += value; }
inline unsigned long long ld_acquire(const unsigned long long* counter) {
  emulator::pause();
  return *counter;
}
inline void prefetch_l2(const void*) {}

inline void cp_async_16(u32 to, const void* from) { emulator::thread_copy(to, from, 16); }
inline void cp_async_commit_group() { emulator::thread_copy_commit(); }
template <int kPending>
void cp_async_wait_group() {
  emulator::thread_copy_wait(kPending);
}
inline void cp_async_wait_all() { emulator::thread_copy_wait(0); }
inline void cp_async_mbarrier_arrive_noinc(u32 barrier) { emulator::thread_copy_arrive(barrier); }

inline void bar_sync(int name, int threads) { emulator::block_barrier(name, threads, true); }
inline void bar_arrive(int name, int threads) { emulator::block_barrier(name, threads, false); }

}  // namespace kvq::ptx
