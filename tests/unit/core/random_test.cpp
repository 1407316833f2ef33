#include <kvq/core/random.h>

#include <catch2/catch.hpp>

#include <array>
#include <cmath>
#include <set>

using namespace kvq;
using Purpose = RandomStream::Purpose;

TEST_CASE("Philox4x32-10 gives the numbers that its authors published", "[core]") {
  using Four = std::array<std::uint32_t, 4>;
  CHECK(philox({0, 0, 0, 0}, {0, 0}) == Four{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  constexpr std::uint32_t ones = 0xffffffff;
  CHECK(philox({ones, ones, ones, ones}, {ones, ones}) == Four{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        Four{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("A stream is a function of its key, and every part of the key counts", "[core]") {
  const auto first = [](std::uint64_t seed, Purpose purpose, std::uint32_t layer, std::uint32_t head) {
    RandomStream stream(seed, purpose, layer, head);
    std::array<std::uint32_t, 3> numbers{};
    for (auto& number : numbers) number = stream.next_u32();
    return numbers;
  };
  CHECK(first(7, Purpose::haar, 2, 3) == first(7, Purpose::haar, 2, 3));
  std::set<std::array<std::uint32_t, 3>> streams;
  for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32, std::uint64_t{1} << 63})
    for (const Purpose purpose : {Purpose::haar, Purpose::signs, Purpose::sign_search, Purpose::kmeans, Purpose::test})
      for (const std::uint32_t layer : {0u, 1u, 2u, 95u})
        for (const std::uint32_t head : {0u, 1u, 2u, 127u}) streams.insert(first(seed, purpose, layer, head));
  CHECK(streams.size() == 4 * 5 * 4 * 4);
}

TEST_CASE("A long stream does not repeat", "[core]") {
  RandomStream stream(1, Purpose::test);
  std::set<std::uint32_t> seen;
  for (int i = 0; i < 4096; ++i) seen.insert(stream.next_u32());
  CHECK(seen.size() >= 4094);  // 2^12 draws of 2^32 numbers: the chance of a collision is 0.002
}

TEST_CASE("Uniform numbers lie inside (0, 1) and normal numbers have the moments of a Gaussian", "[core]") {
  RandomStream stream(3, Purpose::test, 4, 5);
  constexpr int kCount = 200000;
  double sum = 0.0, squares = 0.0;
  for (int i = 0; i < kCount; ++i) {
    const double u = stream.next_uniform();
    REQUIRE(u > 0.0);
    REQUIRE(u < 1.0);
    sum += u;
    squares += u * u;
  }
  // Five standard errors each.
  CHECK(std::abs(sum / kCount - 0.5) < 5 * std::sqrt(1.0 / 12 / kCount));
  CHECK(std::abs(squares / kCount - 1.0 / 3) < 5 * std::sqrt(4.0 / 45 / kCount));

  double moments[5] = {};
  for (int i = 0; i < kCount; ++i) {
    const double x = stream.next_normal();
    for (int power = 1; power <= 4; ++power) moments[power] += std::pow(x, power) / kCount;
  }
  CHECK(std::abs(moments[1]) < 5 * std::sqrt(1.0 / kCount));
  CHECK(std::abs(moments[2] - 1.0) < 5 * std::sqrt(2.0 / kCount));
  CHECK(std::abs(moments[3]) < 5 * std::sqrt(15.0 / kCount));
  CHECK(std::abs(moments[4] - 3.0) < 5 * std::sqrt(96.0 / kCount));
}
