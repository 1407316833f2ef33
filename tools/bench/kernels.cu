#include "bench/kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace kvq::bench {

namespace {

constexpr int kThreads = 256;

Status launched(const char* what) {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? Status{} : Status::fail(StatusCode::cuda, "%s: %s", what, cudaGetErrorString(error));
}

unsigned blocks_for(std::int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

__device__ std::int64_t global_thread() { return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

__device__ unsigned hash(unsigned long long x) {
  x ^= x >> 31, x *= 0x7fb5d329728ea185ull, x ^= x >> 27, x *= 0x81dadef4bc2dd44dull;
  return static_cast<unsigned>(x >> 32);
}
/// The lower or the upper 16 bits as a number in [0, 1).
__device__ float lower(unsigned bits) { return static_cast<float>(bits & 0xFFFF) / 65536.0f; }
__device__ float upper(unsigned bits) { return static_cast<float>(bits >> 16) / 65536.0f; }
/// Approximately normal: the sum of four uniform numbers, scaled to variance 1.
__device__ float about_normal(unsigned long long key) {
  const unsigned a = hash(2 * key), b = hash(2 * key + 1);
  return (lower(a) + upper(a) + lower(b) + upper(b) - 2.0f) * 1.7320508f;
}

__device__ unsigned short to_16_bits(float x, bool bf16) {
  return bf16 ? __bfloat16_as_ushort(__float2bfloat16(x)) : __half_as_ushort(__float2half(x));
}
__device__ float from_16_bits(unsigned short bits, bool bf16) {
  return bf16 ? __bfloat162float(__ushort_as_bfloat16(bits)) : __half2float(__ushort_as_half(bits));
}
__device__ unsigned pair_of(float low, float high, bool bf16) {
  return to_16_bits(low, bf16) | static_cast<unsigned>(to_16_bits(high, bf16)) << 16;
}

/// Each thread writes one 4-byte word.
__global__ void fill_pages_kernel(unsigned* words, std::int64_t count, PageLayout layout, bool k_bfloat, bool v_bfloat,
                                  unsigned seed) {
  const std::int64_t i = global_thread();
  if (i >= count) return;
  const int in_head = static_cast<int>(i * 4 % layout.head_bytes()), keys = layout.tiles() * layout.k.bytes();
  const bool value = in_head >= keys, bfloat = value ? v_bfloat : k_bfloat;
  const TileSide& side = value ? layout.v : layout.k;
  const int in_tile = (value ? in_head - keys : in_head) % side.bytes();
  const unsigned long long key = static_cast<unsigned long long>(i) * 64 + seed;
  const unsigned bits = hash(key);
  if (side.exact()) {
    words[i] = pair_of(about_normal(key), about_normal(key + 32), true);
  } else if (in_tile < side.code_bytes() || in_tile >= side.code_bytes() + side.number_bytes()) {  // codes, indices
    words[i] = bits;
  } else {
    const float levels = side.is_bits() ? 3.0f : static_cast<float>((1 << side.bits) - 1);
    const float scale = (0.6f + 1.8f * lower(bits)) / levels;
    words[i] = side.numbers == 2 ? pair_of(scale, -0.5f * levels * scale + 0.3f * (upper(bits) - 0.5f), bfloat)
                                 : pair_of(scale, (0.6f + 1.8f * upper(bits)) / levels, bfloat);
  }
}

__global__ void fill_rows_kernel(unsigned short* rows, std::int64_t count, bool bf16, unsigned seed) {
  const std::int64_t i = global_thread();
  if (i < count) rows[i] = to_16_bits(about_normal(static_cast<unsigned long long>(i) * 64 + seed), bf16);
}

__device__ unsigned folded(uint4 x) { return x.x ^ x.y ^ x.z ^ x.w; }

/// Each thread keeps four loads in flight.
__device__ unsigned read_run(const uint4* from, std::int64_t count) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  std::int64_t i = global_thread();
  unsigned all = 0;
  for (; i + 3 * stride < count; i += 4 * stride) {
    const uint4 a = __ldcs(from + i), b = __ldcs(from + i + stride), c = __ldcs(from + i + 2 * stride),
                d = __ldcs(from + i + 3 * stride);
    all ^= folded(a) ^ folded(b) ^ folded(c) ^ folded(d);
  }
  for (; i < count; i += stride) all ^= folded(__ldcs(from + i));
  return all;
}

__global__ void read_kernel(const uint4* first, std::int64_t first_count, const uint4* second,
                            std::int64_t second_count, unsigned* sink) {
  const unsigned all = read_run(first, first_count) ^ read_run(second, second_count);
  if (all == 0x12345u) *sink = all;  // hardly ever true; the store keeps the compiler from removing the loads
}

__global__ void copy_kernel(uint4* to, const uint4* from, std::int64_t count) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  std::int64_t i = global_thread();
  for (; i + 3 * stride < count; i += 4 * stride) {
    const uint4 a = __ldcs(from + i), b = __ldcs(from + i + stride), c = __ldcs(from + i + 2 * stride),
                d = __ldcs(from + i + 3 * stride);
    __stcs(to + i, a), __stcs(to + i + stride, b), __stcs(to + i + 2 * stride, c), __stcs(to + i + 3 * stride, d);
  }
  for (; i < count; i += stride) __stcs(to + i, __ldcs(from + i));
}

/// Each thread has eight neighboring channels; blocks of more than eight channels exchange by warp shuffles.
/// blockIdx.y: 0 for K, 1 for V.
__global__ void rotate_kernel(const uint4* k, const uint4* v, uint4* k_rotated, uint4* v_rotated, std::int64_t k_count,
                              std::int64_t v_count, int order, bool bf16) {
  const bool value = blockIdx.y == 1;
  const std::int64_t i = global_thread(), count = value ? v_count : k_count;
  const bool mine = i < count;
  uint4 raw = mine ? (value ? v : k)[i] : uint4{};
  auto* words = reinterpret_cast<unsigned*>(&raw);
  float x[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] = from_16_bits(static_cast<unsigned short>(words[e / 2] >> (16 * (e % 2))), bf16);
#pragma unroll
  for (int bit = 1; bit < 8; bit *= 2)
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (!(e & bit)) {
        const float a = x[e], b = x[e | bit];
        x[e] = a + b, x[e | bit] = a - b;
      }
  for (int lanes = 1; 8 * lanes < order; lanes *= 2)
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float other = __shfl_xor_sync(~0u, x[e], lanes);
      x[e] = threadIdx.x & static_cast<unsigned>(lanes) ? other - x[e] : x[e] + other;
    }
  const float scale = rsqrtf(static_cast<float>(order));
#pragma unroll
  for (int w = 0; w < 4; ++w) words[w] = pair_of(x[2 * w] * scale, x[2 * w + 1] * scale, bf16);
  if (mine) (value ? v_rotated : k_rotated)[i] = raw;
}

}  // namespace

Status fill_pages(CUstream_st* stream, std::byte* pages, std::int64_t num_pages, const PageLayout& layout,
                  bool k_bfloat, bool v_bfloat, unsigned seed) {
  const std::int64_t words = num_pages * layout.page_bytes() / 4;
  fill_pages_kernel<<<blocks_for(words), kThreads, 0, stream>>>(reinterpret_cast<unsigned*>(pages), words, layout,
                                                                k_bfloat, v_bfloat, seed);
  return launched("fill_pages");
}

Status fill_rows(CUstream_st* stream, void* rows, std::int64_t count, bool bf16, unsigned seed) {
  fill_rows_kernel<<<blocks_for(count), kThreads, 0, stream>>>(static_cast<unsigned short*>(rows), count, bf16, seed);
  return launched("fill_rows");
}

Status read_bytes(CUstream_st* stream, int multiprocessors, const std::byte* first, std::int64_t first_bytes,
                  const std::byte* second, std::int64_t second_bytes, unsigned* sink) {
  read_kernel<<<static_cast<unsigned>(8 * multiprocessors), kThreads, 0, stream>>>(
      reinterpret_cast<const uint4*>(first), first_bytes / 16, reinterpret_cast<const uint4*>(second),
      second_bytes / 16, sink);
  return launched("read_bytes");
}

Status copy_bytes(CUstream_st* stream, int multiprocessors, std::byte* to, const std::byte* from, std::int64_t bytes) {
  copy_kernel<<<static_cast<unsigned>(8 * multiprocessors), kThreads, 0, stream>>>(
      reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from), bytes / 16);
  return launched("copy_bytes");
}

Status rotate_rows(CUstream_st* stream, const void* k, const void* v, void* k_rotated, void* v_rotated,
                   std::int64_t k_count, std::int64_t v_count, int order, bool bf16) {
  const std::int64_t most = (k_count > v_count ? k_count : v_count) / 8;
  rotate_kernel<<<dim3(blocks_for(most), 2), kThreads, 0, stream>>>(
      static_cast<const uint4*>(k), static_cast<const uint4*>(v), static_cast<uint4*>(k_rotated),
      static_cast<uint4*>(v_rotated), k_count / 8, v_count / 8, order, bf16);
  return launched("rotate_rows");
}

}  // namespace kvq::bench
