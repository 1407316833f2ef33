#include <kvq/runtime/kernels/copy/params.h>

#include <catch2/catch.hpp>

#include <cstddef>
#include <string>

using namespace kvq;
using Catch::Contains;

namespace {

/// A copy of five rings from entry to entry; no test follows the pointers.
CopyParams good() {
  static std::int32_t entries[8];
  static RingState states[4];
  CopyParams p;
  p.num_layers = 3, p.most_bytes = 4096, p.buffer_bytes = 3 * 4096 + 16;
  p.count = 5, p.num_entries = 4;
  p.from = p.to = entries;
  p.ring_states = states;
  return p;
}

alignas(16) std::byte memory[64];

template <typename Change>
Status checked(const Change& change) {
  CopyParams p = good();
  change(p);
  return check_copy(p);
}

}  // namespace

TEST_CASE("Copies that cannot be are refused by name", "[runtime]") {
  using P = CopyParams;
  const auto refusal = [](auto change) {
    const Status status = checked(change);
    CHECK(status.code() == StatusCode::invalid_argument);
    return std::string(status.message());
  };
  static std::uint64_t ids[2];
  const auto* odd = reinterpret_cast<const std::int32_t*>(memory + 2);
  CHECK_THAT(refusal([](P& p) { p.count = -1; }), Contains("count is -1"));
  CHECK_THAT(refusal([](P& p) { p.from = p.to = nullptr; }), Contains("from and to are null"));
  CHECK_THAT(refusal([](P& p) { p.from = nullptr; }), Contains("buffer must not be null"));
  CHECK_THAT(refusal([](P& p) { p.to = nullptr, p.buffer = memory + 8; }), Contains("aligned to 16 bytes"));
  CHECK_THAT(refusal([](P& p) { p.buffer = memory; }), Contains("a buffer beside from and to"));
  CHECK_THAT(refusal([&](P& p) { p.from = odd; }), Contains("aligned to 4 bytes"));
  CHECK_THAT(refusal([&](P& p) { p.to = odd; }), Contains("aligned to 4 bytes"));
  CHECK_THAT(refusal([](P& p) { p.sequence_ids = reinterpret_cast<const std::uint64_t*>(memory + 4); }),
             Contains("sequence_ids to 8"));
  CHECK_THAT(refusal([](P& p) { p.sequence_ids = ids, p.ring_states = nullptr; }),
             Contains("sequence_ids go with rings"));
}

TEST_CASE("Copies between entries, from a buffer and to one are sound", "[runtime]") {
  using P = CopyParams;
  static std::uint64_t ids[2];
  CHECK(std::string(check_copy(good()).message()) == "");
  CHECK(checked([](P& p) { p.from = nullptr, p.buffer = memory, p.sequence_ids = ids; }).ok());
  CHECK(checked([](P& p) { p.to = nullptr, p.buffer = memory; }).ok());
  CHECK(checked([](P& p) { p.ring_states = nullptr; }).ok());
  CHECK(checked([](P& p) { p.count = 0, p.from = p.to = nullptr; }).ok());
}

TEST_CASE("A copy of more entries than a launch has blocks for is refused", "[runtime]") {
  const auto of = [](int count, int layers, std::int64_t bytes) {
    return checked([&](CopyParams& p) { p.count = count, p.num_layers = layers, p.most_bytes = bytes; });
  };
  CHECK(of(1 << 20, 80, 32 << 10).ok());
  const Status status = of(1 << 20, 80, std::int64_t{1} << 20);
  CHECK(status.code() == StatusCode::unsupported);
  CHECK_THAT(std::string(status.message()), Contains("1048576 entries of 80 layers"));
}
