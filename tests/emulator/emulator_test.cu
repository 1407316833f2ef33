#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/device/launch.cuh>
#include <kvq/device/ptx.cuh>

#define CATCH_CONFIG_EXTERNAL_INTERFACES
#include <catch2/catch.hpp>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <random>
#include <string>
#include <vector>

// The emulated device itself: instructions have their defined effects, and mistakes are reported.

namespace kvq::emulator {
namespace {

/// Orders of a test case depend on --rng-seed alone, not on the other cases that run.
struct Seeds : Catch::TestEventListenerBase {
  using TestEventListenerBase::TestEventListenerBase;
  void testCaseStarting(const Catch::TestCaseInfo&) override { set_seed(Catch::rngSeed()); }
};
CATCH_REGISTER_LISTENER(Seeds)

template <typename... Parameters>
void run(void (*kernel)(Parameters...), dim3 grid, int threads, std::type_identity_t<Parameters>... arguments) {
  REQUIRE(kvq::launch_kernel(kernel, grid, threads, 16384, false, nullptr, arguments...) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
}

/// The message with which the emulated device ends the program; empty if it does not end it.
template <typename Act>
std::string complaint(Act act) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], 2);
    signal(SIGABRT, SIG_DFL), signal(SIGSEGV, SIG_DFL);  // not Catch's
    act();
    _exit(0);
  }
  close(ends[1]);
  std::string said;
  char piece[4096];
  for (ssize_t n; (n = read(ends[0], piece, sizeof piece)) > 0;) said.append(piece, static_cast<std::size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK((said.empty() || status != 0));
  return said;
}
using Catch::Matchers::Contains;

/// Dynamic shared memory, 16 KiB.
std::byte* dynamic_shared() { return shared_window(); }

__global__ void exchange_kernel(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  out[lane] = __shfl_sync(~0u, lane * lane, (lane + 5) & 31);
  out[32 + lane] = __shfl_xor_sync(~0u, lane, 3);
  out[64 + lane] = __shfl_up_sync(~0u, lane, 2);
  out[96 + lane] = static_cast<int>(__ballot_sync(~0u, lane % 3 == 0));
  out[128 + lane] = __reduce_add_sync(~0u, lane);
  if (lane < 8) out[160 + lane] = __any_sync(0xFFu, lane == 7) + 2 * __all_sync(0xFFu, lane < 7);
}

/// c [16, 8] = a [16, 32] b [32, 8], each lane loading what the instruction's definition gives it.
__global__ void product_kernel(const unsigned char* a, const signed char* b, int* c) {
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
  const auto four = [](const auto* from, int stride) {
    unsigned word = 0;
    for (int i = 0; i < 4; ++i) word |= static_cast<unsigned>(static_cast<unsigned char>(from[i * stride])) << (8 * i);
    return word;
  };
  int sums[4] = {1, 2, 3, 4};
  ptx::mma_m16n8k32_u8s8(sums, four(a + g * 32 + 4 * t, 1), four(a + (g + 8) * 32 + 4 * t, 1),
                         four(a + g * 32 + 16 + 4 * t, 1), four(a + (g + 8) * 32 + 16 + 4 * t, 1),
                         four(b + 4 * t * 8 + g, 8), four(b + (16 + 4 * t) * 8 + g, 8));
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}

/// Counts of bits that are set in both, a [16, 256] and b [8, 256], one word for each 32: of all, then of the first
/// 128; then products of the same words as 32 bytes, a signed and b unsigned, then both signed, then both signed of the
/// first half.
__global__ void bits_kernel(const unsigned* a, const unsigned* b, int* c) {
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
  const auto of = [&](const unsigned* from, int row, int half) { return from[row * 8 + half * 4 + t]; };
  int all[4] = {1, 2, 3, 4}, half[4] = {}, bytes[4] = {}, both[4] = {}, half_bytes[4] = {};
  ptx::mma_m16n8k256_b1(all, of(a, g, 0), of(a, g + 8, 0), of(a, g, 1), of(a, g + 8, 1), of(b, g, 0), of(b, g, 1));
  ptx::mma_m16n8k128_b1(half, of(a, g, 0), of(a, g + 8, 0), of(b, g, 0));
  ptx::mma_m16n8k32_s8u8(bytes, of(a, g, 0), of(a, g + 8, 0), of(a, g, 1), of(a, g + 8, 1), of(b, g, 0), of(b, g, 1));
  ptx::mma_m16n8k32_s8s8(both, of(a, g, 0), of(a, g + 8, 0), of(a, g, 1), of(a, g + 8, 1), of(b, g, 0), of(b, g, 1));
  ptx::mma_m16n8k16_s8s8(half_bytes, of(a, g, 0), of(a, g + 8, 0), of(b, g, 0));
  for (int i = 0; i < 4; ++i) {
    int* to = c + (g + i / 2 * 8) * 8 + 2 * t + i % 2;
    to[0] = all[i], to[128] = half[i], to[256] = bytes[i], to[384] = both[i], to[512] = half_bytes[i];
  }
}

/// A ring of one stage: the first thread copies, all others sum. @param waits  threads wait for the copy
__global__ void copy_kernel(const float* from, int rounds, float* sums, bool waits) {
  std::byte* shared = dynamic_shared();
  const ptx::u32 full = ptx::shared_address(shared), empty = full + 8, stage = full + 128;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  if (thread == 0) mbarrier_init(full, 1), mbarrier_init(empty, static_cast<unsigned>(threads - 1));
  __syncthreads();
  for (int round = 0; round < rounds; ++round) {
    const unsigned parity = static_cast<unsigned>(round & 1);
    if (thread == 0) {
      if (round > 0) mbarrier_wait(empty, parity ^ 1);
      mbarrier_arrive(full, 64);
      bulk_copy(stage, from + 16 * round, 64, full);
    } else {
      if (waits) mbarrier_wait(full, parity);
      const float* stored = reinterpret_cast<const float*>(shared + 128);
      for (int i = 0; i < 16; ++i) sums[thread] += stored[i];
      mbarrier_arrive(empty);
    }
  }
  if (thread == 0) mbarrier_wait(full, static_cast<unsigned>((rounds & 1) ^ 1));
}

__global__ void ticket_kernel(int* ticket, int* order) {
  __syncwarp();
  order[atomicAdd(ticket, 1)] = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}

__global__ void first_kernel(int* value) {
  launch_dependents();
  for (int i = 0; i < 50; ++i) __nanosleep(1);
  if (threadIdx.x == 0) atomicAdd(value, 1);
}
__global__ void second_kernel(const int* value, int* early, int* late) {
  if (threadIdx.x == 0) early[blockIdx.x] = *value;
  wait_for_kernels_before();
  if (threadIdx.x == 0) late[blockIdx.x] = *value;
}

// Kernels with mistakes.
__global__ void lonely_barrier_kernel() {
  if (threadIdx.x != 5) __syncthreads();
}
__global__ void two_places_kernel() {
  if (threadIdx.x < 16)
    __shfl_sync(~0u, 1, 0);
  else
    __ballot_sync(~0u, 1);
}
__global__ void left_copy_kernel(const float* from) {
  const ptx::u32 full = ptx::shared_address(dynamic_shared());
  mbarrier_init(full, 1);
  mbarrier_arrive(full, 64);
  bulk_copy(full + 128, from, 64, full);
}
__global__ void crooked_copy_kernel(const float* from) {
  ptx::cp_async_16(ptx::shared_address(dynamic_shared()), from + 1);
}
__global__ void arrivals_kernel() {
  const ptx::u32 barrier = ptx::shared_address(dynamic_shared());
  mbarrier_init(barrier, 1);
  mbarrier_arrive(barrier, 64);
  mbarrier_arrive(barrier);
}
__global__ void behind_kernel() { dynamic_shared()[16384 + threadIdx.x] = std::byte{1}; }

}  // namespace

TEST_CASE("Lanes of a warp exchange what they have", "[emulated]") {
  std::vector<int> out(192, -1);
  run(exchange_kernel, 1, 32, out.data());
  for (int lane = 0; lane < 32; ++lane) {
    const auto at = [&](int i) { return out[static_cast<std::size_t>(i + lane)]; };
    CHECK(at(0) == ((lane + 5) & 31) * ((lane + 5) & 31));
    CHECK(at(32) == (lane ^ 3));
    CHECK(at(64) == (lane < 2 ? lane : lane - 2));
    CHECK(at(96) == 0x49249249);
    CHECK(at(128) == 496);
    CHECK(at(160) == (lane < 8 ? 1 : -1));
  }
}

TEST_CASE("A product of a warp is the product of the matrices", "[emulated]") {
  std::mt19937 random(1);
  std::vector<unsigned char> a(16 * 32);
  std::vector<signed char> b(32 * 8);
  for (auto& x : a) x = static_cast<unsigned char>(random());
  for (auto& x : b) x = static_cast<signed char>(random());
  std::vector<int> c(16 * 8);
  run(product_kernel, 1, 32, a.data(), b.data(), c.data());
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      int sum = 1 + row / 8 * 2 + column % 2;
      for (int k = 0; k < 32; ++k)
        sum += a[static_cast<std::size_t>(row * 32 + k)] * b[static_cast<std::size_t>(k * 8 + column)];
      CHECK(c[static_cast<std::size_t>(row * 8 + column)] == sum);
    }
}

TEST_CASE("Products of bits and of signed bytes are those of the manual", "[emulated]") {
  std::vector<unsigned> a(16 * 8), b(8 * 8);
  unsigned seed = 1;
  for (auto* words : {&a, &b})
    for (unsigned& word : *words) seed = seed * 1664525u + 1013904223u, word = seed ^ seed >> 15;
  std::vector<int> c(5 * 16 * 8);
  run(bits_kernel, 1, 32, a.data(), b.data(), c.data());
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      int all = 1 + row / 8 * 2 + column % 2, half = 0, bytes = 0, both = 0, half_bytes = 0;
      for (int w = 0; w < 8; ++w) {
        const unsigned x = a[static_cast<std::size_t>(row * 8 + w)], y = b[static_cast<std::size_t>(column * 8 + w)];
        all += std::popcount(x & y);
        if (w < 4) half += std::popcount(x & y);
        for (int i = 0; i < 32; i += 8) {
          bytes += static_cast<std::int8_t>(x >> i) * static_cast<int>(y >> i & 0xFF);
          const int product = static_cast<std::int8_t>(x >> i) * static_cast<std::int8_t>(y >> i);
          both += product;
          if (w < 4) half_bytes += product;
        }
      }
      const auto at = static_cast<std::size_t>(row * 8 + column);
      CHECK(c[at] == all);
      CHECK(c[at + 128] == half);
      CHECK(c[at + 256] == bytes);
      CHECK(c[at + 384] == both);
      CHECK(c[at + 512] == half_bytes);
    }
}

TEST_CASE("A copy is there for who waits, and shows who does not", "[emulated]") {
  alignas(16) static float from[16 * 9];
  for (int i = 0; i < 16 * 9; ++i) from[i] = static_cast<float>(i);
  std::vector<float> sums(40);
  run(copy_kernel, 1, 40, from, 9, sums.data(), true);
  for (std::size_t i = 1; i < sums.size(); ++i) CHECK(sums[i] == 143.0f * 144.0f / 2);
  std::fill(sums.begin(), sums.end(), 0.0f);
  run(copy_kernel, 1, 40, from, 1, sums.data(), false);
  CHECK(std::count(sums.begin() + 1, sums.end(), 120.0f) < 39);
}

TEST_CASE("A seed decides the order of all threads", "[emulated]") {
  const auto order_of = [](std::uint64_t seed) {
    set_seed(seed);
    int ticket = 0;
    std::vector<int> order(8 * 64);
    run(ticket_kernel, 8, 64, &ticket, order.data());
    return order;
  };
  CHECK(order_of(1) == order_of(1));
  CHECK(order_of(1) != order_of(2));
}

TEST_CASE("A kernel that may overlap starts early, and waits where it says so", "[emulated]") {
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  int value = 0;
  std::vector<int> early(4, -1), late(4, -1);
  const bool overlaps = GENERATE(false, true);
  REQUIRE(kvq::launch_kernel(first_kernel, 4, 32, 0, false, stream, &value) == cudaSuccess);
  REQUIRE(kvq::launch_kernel(second_kernel, 4, 32, 0, overlaps, stream, &value, early.data(), late.data()) ==
          cudaSuccess);
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK((*std::min_element(early.begin(), early.end()) < 4) == overlaps);
  CHECK(late == std::vector<int>(4, 4));
  REQUIRE(cudaStreamDestroy(stream) == cudaSuccess);
}

TEST_CASE("Mistakes end the program and are named", "[emulated]") {
  alignas(16) static float from[32] = {};
  CHECK_THAT(complaint([] { run(lonely_barrier_kernel, 1, 64); }), Contains("nothing goes on any more"));
  CHECK_THAT(complaint([] { run(two_places_kernel, 1, 32); }), Contains("lanes of a warp meet at"));
  CHECK_THAT(complaint([] { run(left_copy_kernel, 1, 1, from); }), Contains("copies were on their way"));
  CHECK_THAT(complaint([] { run(crooked_copy_kernel, 1, 1, from); }), Contains("no multiples of 16"));
  CHECK_THAT(complaint([] { run(arrivals_kernel, 1, 1); }), Contains("more arrivals than its count"));
  CHECK_THAT(complaint([] { run(behind_kernel, 1, 32); }), Contains("wrote behind"));
  int ticket = 0, order[32];
  CHECK(complaint([&] { run(ticket_kernel, 1, 32, &ticket, order); }).empty());
}

TEST_CASE("Decode refuses a queue of 2^32 KV chunks", "[emulated]") {
  // 32 heads of 5 sequences of 2^31 - 64 tokens, 64 to a KV chunk.
  const DecodeVariant& variant = *decode_variants().front();
  REQUIRE(std::string(variant.name) == "decode_d128_u2g128_u2g128_h4_bf16");
  constexpr int kHeads = 32, kLength = 0x7FFFFFC0, kBatch = 5;
  DecodeLaunch launch;
  REQUIRE(variant.plan(launch).ok());
  std::vector<int> lengths(kBatch, kLength);
  std::vector<unsigned short> q(kBatch * kHeads * 128), out(q.size());
  FaultRecord fault;
  DecodeParams p;
  p.num_q_heads = p.cache.num_kv_heads = kHeads, p.softmax_scale = 1.0f;
  p.q = q.data(), p.out = out.data(), p.q_stride = p.out_stride = kHeads * 128;
  p.cache.batch = kBatch, p.cache.seq_lens = lengths.data(), p.cache.page_table_stride = kLength,
  p.cache.faults = &fault;
  REQUIRE(cudaMalloc(&p.workspace, decode_workspace_bytes(launch, kBatch * kHeads)) == cudaSuccess);
  CHECK(variant.run(launch, p, nullptr).ok());
  cudaDeviceSynchronize();
  CHECK(fault.code == static_cast<int>(FaultCode::length));
  for (const unsigned short x : out) REQUIRE((x & 0x7FFF) > 0x7F80);  // NaN
  cudaFree(p.workspace);
}

}  // namespace kvq::emulator
