#include <kvq/compute/device_bytes.h>
#include <kvq/compute/device_memory.h>
#include <kvq/core/error.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

namespace kvq::test {

namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

/// Memory of the host in place of a device's. What is taken is all that a test looks at.
std::int64_t blocks = 0;
DeviceMemory::Allocator counting() {
  return {[](std::size_t, const char*) -> void* { return ++blocks, std::malloc(1); },
          [](void* memory) { --blocks, std::free(memory); }};
}

struct OneLane {
  explicit OneLane(DeviceMemory& memory) : lane(memory, mutex) {}
  std::mutex mutex;
  Lane lane;
  Buffer a{lane}, b{lane};
};

/// Claims and takes it all, in one buffer.
std::int64_t fill(OneLane& of, std::int64_t smallest, std::int64_t wanted) {
  const std::lock_guard lock(of.mutex);
  const Claim claim(of.lane, {smallest, wanted, "a test"});
  of.a.room<std::byte>(static_cast<std::size_t>(claim.bytes()), "a test");
  return claim.bytes();
}

}  // namespace

TEST_CASE("A claim gets what it wants, or what is left", "[compute]") {
  blocks = 0;
  DeviceMemory memory(100 * kMiB, 7 * kMiB, counting());
  {
    OneLane one(memory), other(memory);
    CHECK(fill(one, kMiB, 60 * kMiB) == 60 * kMiB);
    CHECK(memory.most_used() >= 67 * kMiB);
    // The first one's memory is a cache by now, which goes.
    CHECK(fill(other, kMiB, 90 * kMiB) == 90 * kMiB);
    CHECK(one.a.is_empty());
    CHECK(blocks == 1);
    const std::lock_guard lock(one.mutex);
    const Claim first(one.lane, {kMiB, 70 * kMiB, "a test"});
    CHECK(other.a.is_empty());
    const std::lock_guard other_lock(other.mutex);
    const Claim second(other.lane, {kMiB, 70 * kMiB, "a test"});
    CHECK(first.bytes() == 70 * kMiB);
    CHECK(second.bytes() < 30 * kMiB);
    CHECK(second.bytes() > 29 * kMiB);
  }
  CHECK(blocks == 0);
  CHECK(memory.most_used() <= 107 * kMiB);
}

TEST_CASE("Too small a limit is refused, with the size that would be enough", "[compute]") {
  DeviceMemory memory(100 * kMiB, 900 * kMiB, counting());
  OneLane one(memory);
  try {
    fill(one, 200 * kMiB, 200 * kMiB);
    FAIL("accepted");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::unsupported);
    CHECK(std::string(error.what()) ==
          "CUDA device: a test: expected room for at least 1.16GB of device memory, found 1.04GB");
    CHECK(error.hint().starts_with("--mem-limit 1.16GB"));
  }
  // What was not claimed is refused, too, and leaves the memory as it was.
  CHECK_THROWS_AS(one.a.room<std::byte>(101 * kMiB, "a test"), Error);
  CHECK(one.a.room<std::byte>(50 * kMiB, "a test") != nullptr);
  CHECK(fill(one, 90 * kMiB, 95 * kMiB) == 95 * kMiB);
}

TEST_CASE("Threads that want more than there is take turns, below the limit", "[compute]") {
  blocks = 0;
  DeviceMemory memory(64 * kMiB, 0, counting());
  std::atomic<int> done = 0;
  {
    std::vector<std::unique_ptr<OneLane>> lanes;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) lanes.push_back(std::make_unique<OneLane>(memory));
    for (int t = 0; t < 8; ++t)  // two of each lane
      threads.emplace_back([&, t] {
        for (int i = 0; i < 50; ++i) {
          const std::int64_t smallest = (10 + (t * 7 + i * 13) % 50) * kMiB;
          OneLane& own = *lanes[static_cast<std::size_t>(t) % lanes.size()];
          const std::lock_guard lock(own.mutex);
          const Claim claim(own.lane, {smallest, 63 * kMiB, "a test"});
          own.a.room<std::byte>(static_cast<std::size_t>(smallest / 2), "a test");
          own.b.room<std::byte>(static_cast<std::size_t>(smallest / 2), "a test");
          if (claim.bytes() >= smallest) ++done;
        }
      });
    for (std::thread& thread : threads) thread.join();
  }
  CHECK(done == 400);
  CHECK(blocks == 0);
  CHECK(memory.most_used() <= 64 * kMiB);
}

TEST_CASE("Batches are as large as the memory allows", "[compute]") {
  CHECK(units_at_once(100, 10, 30, 8) == 3);
  CHECK(units_at_once(1000, 10, 30, 8) == 8);
  CHECK(units_at_once(5, 10, 30, 8) == 1);
  CHECK(units_at_once(5, 10, 0, 8) == 8);
}

TEST_CASE("Attention and second moments ask for what long sequences need", "[compute]") {
  using namespace cuda;
  // A layer of Qwen3-8B: heads in batches of 2 GB, as without a limit; one head is the smallest batch.
  const AttentionShape short_one{.tokens = 8878, .group = 4, .k_dim = 128, .v_dim = 128, .scored = true};
  CHECK(attention_heads_wanted(short_one, 8) == 8);
  const Need need = attention_need(short_one, 8);
  CHECK(need.wanted - need.smallest == 7 * attention_head_bytes(short_one));
  CHECK(need.wanted < 1000 * kMiB);
  AttentionShape long_one = short_one;
  long_one.tokens = 131072;
  CHECK(attention_heads_wanted(long_one, 8) == 2);
  CHECK(attention_need(long_one, 8).smallest < 1200 * kMiB);
  // Second moments of a long tensor: one piece of one head, whatever the number of tokens.
  const MomentShape rows{.tokens = kTokensAtOnce, .dim = 128, .heads_per_group = 4};
  MomentShape longer = rows;
  longer.tokens = 16 * kTokensAtOnce;
  CHECK(moment_need(longer, 8).smallest == moment_need(rows, 8).smallest);
  CHECK(moment_need(longer, 8).wanted > 8 * moment_need(rows, 8).wanted);
  CHECK(moment_need(rows, 8).smallest < 120 * kMiB);
}

TEST_CASE("A limit decides how many contexts a device has", "[compute]") {
  using namespace cuda;
  CHECK(lanes_within(kMiB) == 1);
  CHECK(lanes_within(1000 * kMiB) == 1);
  CHECK(lanes_within(2000 * kMiB) == 2);
  CHECK(lanes_within(80'000 * kMiB) == kMostLanes);
  CHECK(bytes_beside(1) == kDeviceBytes + kContextBytes);
}

}  // namespace kvq::test
