#include <kvq/codec/group_coder.h>
#include <kvq/codec/row_codec.h>

#include "support/compare.h"
#include "support/random_data.h"
#include "support/row_plans.h"
#include "support/row_reference.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

using namespace kvq;

namespace {

TrellisTaps random_taps(int bits, int memory, std::uint64_t seed) {
  TrellisTaps taps = test::trellis_coder({bits}, 8, ScaleRule::norm, ScaleType::fp32, seed).taps.at(0);
  taps.memory = memory;
  test::Random random(seed + 1);
  taps.theta.resize(static_cast<std::size_t>(bits));
  while (taps.theta.size() < static_cast<std::size_t>(bits * (memory + 1)))
    taps.theta.push_back(static_cast<float>(0.5 * random.normal()));
  return taps;
}

/// Whether the path ends in the state from which it began, so that its last codes are those of `state`.
bool ends_in(std::span<const std::uint8_t> codes, const TrellisTaps& taps, std::size_t state) {
  std::size_t found = 0;
  for (int k = taps.memory - 1; k >= 0; --k)
    found = found << taps.bits | codes[codes.size() - 1 - static_cast<std::size_t>(k)];
  return found == state;
}

std::vector<std::uint8_t> codes_of(std::uint64_t number, int bits, std::size_t count) {
  std::vector<std::uint8_t> codes;
  for (std::size_t j = 0; j < count; ++j)
    codes.push_back(static_cast<std::uint8_t>((number >> (j * static_cast<std::size_t>(bits))) & ((1u << bits) - 1)));
  return codes;
}

/// The state at the seam, found by trying every path of the first run: 2 g steps from any state.
std::size_t brute_force_seam(const TrellisTaps& taps, const std::vector<float>& y) {
  const std::size_t g = y.size(), steps = 2 * g, before = static_cast<std::size_t>(taps.memory);
  float best = std::numeric_limits<float>::infinity();
  std::size_t seam = 0;
  std::vector<float> table;
  for (std::uint64_t window = 0; window < std::uint64_t{1} << (before + 1); ++window) {
    std::vector<std::uint8_t> history;  // the channel's own code is in the lowest bits
    for (std::size_t k = 0; k <= before; ++k) history.push_back(static_cast<std::uint8_t>(window >> k & 1));
    table.push_back(test::trellis_value(taps, history));
  }
  for (std::uint64_t path = 0; path < std::uint64_t{1} << (steps + before); ++path) {
    // Bit 0 is the oldest code; the first `before` bits are the state before the first step.
    float cost = 0.0f;
    std::uint64_t window = 0;
    for (std::size_t j = 0; j < steps + before; ++j) {
      window = (window << 1 | (path >> j & 1)) & ((std::uint64_t{1} << (before + 1)) - 1);
      if (j < before) continue;
      const float e = y[(j - before) % g] - table[window];
      cost += e * e;
    }
    if (cost < best) {
      best = cost;
      seam = 0;
      for (std::size_t k = 0; k < before; ++k) seam |= static_cast<std::size_t>(path >> (before + g - 1 - k) & 1) << k;
    }
  }
  return seam;
}

}  // namespace

TEST_CASE("Short groups: no closed path from the seam's state is cheaper than the one found", "[codec][trellis]") {
  int rows = 0;
  for (int bits = 1; bits <= 2; ++bits)
    for (int memory = 1; memory <= 3; ++memory)
      for (std::uint64_t seed = 0; seed < 4; ++seed) {
        const TrellisTaps taps = random_taps(bits, memory, seed * 10 + 3);
        const std::vector<float> x = test::gaussian(8, seed + 77);
        const test::Normalized unit = test::normalized(ScaleType::fp32, x);
        const std::size_t seam = test::reference_seam(taps, unit.y);
        std::vector<std::uint8_t> codes(8);
        TrellisGroup(taps, ScaleRule::rms, ScaleType::fp32).encode(x, codes);
        INFO("bits " << bits << ", memory " << memory << ", seed " << seed);
        REQUIRE(ends_in(codes, taps, seam));
        float best = std::numeric_limits<float>::infinity();
        for (std::uint64_t path = 0; path < std::uint64_t{1} << (8 * bits); ++path) {
          const std::vector<std::uint8_t> other = codes_of(path, bits, 8);
          if (ends_in(other, taps, seam)) best = std::min(best, test::closed_cost(taps, unit.y, other));
        }
        CHECK(test::closed_cost(taps, unit.y, codes) == best);
        ++rows;
      }
  CHECK(rows == 24);
}

TEST_CASE("The seam's state is that of the cheapest path over the group's end and beginning", "[codec][trellis]") {
  for (int memory = 1; memory <= 2; ++memory)
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      const TrellisTaps taps = random_taps(1, memory, seed * 7 + 1);
      const std::vector<float> x = test::gaussian(8, seed + 7);
      const test::Normalized unit = test::normalized(ScaleType::fp32, x);
      std::vector<std::uint8_t> codes(8);
      TrellisGroup(taps, ScaleRule::rms, ScaleType::fp32).encode(x, codes);
      INFO("memory " << memory << ", seed " << seed);
      CHECK(ends_in(codes, taps, brute_force_seam(taps, unit.y)));
    }
}

TEST_CASE("The path found is no dearer than taking the nearest value at every channel and then closing",
          "[codec][trellis]") {
  test::Random random(3);
  for (int round = 0; round < 120; ++round) {
    const int bits = random.integer(1, 4), memory = random.integer(1, bits == 1 ? 6 : 6 / bits > 0 ? 6 / bits : 1);
    const auto count = static_cast<std::size_t>(random.integer(8, 140));
    const TrellisTaps taps = random_taps(bits, memory, random.bits());
    const std::vector<float> x = test::gaussian(count, random.bits());
    const test::Normalized unit = test::normalized(ScaleType::fp16, x);
    std::vector<std::uint8_t> codes(count);
    TrellisGroup(taps, ScaleRule::norm, ScaleType::fp16).encode(x, codes);
    // Chooses codes greedily from the same seam, channel by channel; the last codes are those of the seam.
    std::vector<std::uint8_t> greedy = codes;
    for (std::size_t j = 0; j + static_cast<std::size_t>(memory) < count; ++j) {
      float least = std::numeric_limits<float>::infinity();
      std::uint8_t nearest = 0;
      for (int code = 0; code < 1 << bits; ++code) {
        std::vector<std::uint8_t> window = {static_cast<std::uint8_t>(code)};
        for (std::size_t k = 1; k <= static_cast<std::size_t>(memory); ++k)
          window.push_back(greedy[(j + count - k) % count]);
        const float distance = std::abs(unit.y[j] - test::trellis_value(taps, window));
        if (distance < least) {
          least = distance;
          nearest = static_cast<std::uint8_t>(code);
        }
      }
      greedy[j] = nearest;
    }
    INFO("round " << round << ", bits " << bits << ", memory " << memory << ", channels " << count);
    CHECK(test::closed_cost(taps, unit.y, codes) <= test::closed_cost(taps, unit.y, greedy));
  }
}

TEST_CASE("Trellis groups are coded as the text says, bit for bit", "[codec][trellis]") {
  test::Random random(9);
  for (int round = 0; round < 60; ++round) {
    const int bits = random.integer(1, 8),
              memory = random.integer(1, std::min({8 / bits, 16 / bits - 1, bits == 1 ? 6 : 8}));
    const auto count = static_cast<std::size_t>(random.integer(8, bits * memory > 6 ? 34 : 80));
    const ScaleRule rule =
        std::vector{ScaleRule::norm, ScaleRule::rms, ScaleRule::least_squares}[static_cast<std::size_t>(round % 3)];
    const ScaleType type =
        std::vector{ScaleType::fp16, ScaleType::bf16, ScaleType::fp32}[static_cast<std::size_t>(random.integer(0, 2))];
    const TrellisTaps taps = random_taps(bits, memory, random.bits());
    std::vector<float> x = test::gaussian(count, random.bits(), std::exp(3.0 * random.normal()));
    if (round % 5 == 0)
      for (float& value : x) value = std::round(value);  // makes ties
    const TrellisGroup group(taps, rule, type);
    std::vector<std::uint8_t> codes(count);
    std::vector<float> decoded(count);
    const float scale = group.encode(x, codes);
    group.decode(codes, scale, decoded);
    const test::ReferenceGroup expected = test::reference_trellis(taps, rule, type, x);
    INFO("round " << round << ", bits " << bits << ", memory " << memory << ", channels " << count);
    CHECK(codes == expected.codes);
    CHECK(std::bit_cast<std::uint32_t>(scale) == std::bit_cast<std::uint32_t>(expected.scale));
    CHECK(test::first_bit_difference(decoded, expected.decoded) == "");
  }
}

TEST_CASE("Equal costs: the smallest dropped code, the smallest last state", "[codec][trellis]") {
  // With thetas of zero for earlier codes, many paths cost the same; x on a grid adds ties.
  for (int bits = 1; bits <= 2; ++bits)
    for (int memory = 1; memory <= 2; ++memory) {
      TrellisTaps taps{
          .bits = bits,
          .memory = memory,
          .theta = std::vector<float>(static_cast<std::size_t>(bits * (memory + 1)), 0.0f),
      };
      taps.theta[0] = 2.0f;
      taps.theta[static_cast<std::size_t>(bits)] = 1.0f;
      for (std::uint64_t seed = 0; seed < 6; ++seed) {
        test::Random random(seed);
        std::vector<float> x(12);
        for (float& value : x) value = static_cast<float>(random.integer(-1, 1));
        std::vector<std::uint8_t> codes(x.size());
        TrellisGroup(taps, ScaleRule::norm, ScaleType::fp32).encode(x, codes);
        CHECK(codes == test::reference_trellis(taps, ScaleRule::norm, ScaleType::fp32, x).codes);
      }
    }
}

TEST_CASE("A memory that does not count gives symmetric codes with the trellis's scale", "[codec][trellis]") {
  // theta[i] = 2^i and 0 elsewhere: v = (2c - 2^b + 1) / 2.
  for (int bits = 1; bits <= 4; ++bits) {
    TrellisTaps taps{.bits = bits, .memory = 1, .theta = std::vector<float>(static_cast<std::size_t>(2 * bits), 0.0f)};
    for (int i = 0; i < bits; ++i) taps.theta[static_cast<std::size_t>(i)] = std::ldexp(1.0f, i);
    const TrellisGroup group(taps, ScaleRule::rms, ScaleType::fp32);
    std::vector<std::uint8_t> codes(16);
    std::vector<float> decoded(16);
    for (std::size_t j = 0; j < 16; ++j) codes[j] = static_cast<std::uint8_t>(j % (1u << bits));
    group.decode(codes, 2.0f, decoded);
    for (std::size_t j = 0; j < 16; ++j) CHECK(decoded[j] == static_cast<float>(2 * codes[j] + 1 - (1 << bits)));
  }
}

TEST_CASE("Groups of fewer than 8 channels are symmetric: norm, or least squares where that is the rule",
          "[codec][trellis]") {
  static_assert(TrellisGroup::kLeastChannels == 8);
  for (int channels = 1; channels <= 9; ++channels)
    for (int bits = 1; bits <= 8; ++bits)
      for (const ScaleRule rule : {ScaleRule::norm, ScaleRule::rms, ScaleRule::least_squares}) {
        const RowCodec trellis(test::trellis_coder({bits}, channels, rule, ScaleType::fp16, 5, 4), 1.0, 2 * channels);
        const UniformCoder coder{
            .bits = bits,
            .group_size = channels,
            .levels = UniformLevels::symmetric,
            .rule = rule == ScaleRule::least_squares ? ScaleRule::least_squares : ScaleRule::norm,
            .scale_type = ScaleType::fp16,
        };
        const RowCodec symmetric(coder, 1.0, 2 * channels);
        const std::vector<float> x =
            test::gaussian(static_cast<std::size_t>(2 * channels), static_cast<std::uint64_t>(channels * 8 + bits));
        std::vector<float> a = x, b = x;
        trellis.quantize(a);
        symmetric.quantize(b);
        INFO(channels << " channels, " << bits << " bits, " << to_string(rule));
        CHECK((test::first_bit_difference(a, b) == "") == (channels < 8));
      }
}

TEST_CASE("Scales of rows whose energy or products overflow saturate, and are numbers", "[codec][trellis]") {
  for (const ScaleType type : {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32})
    for (const ScaleRule rule : {ScaleRule::norm, ScaleRule::rms, ScaleRule::least_squares})
      for (int every = 2; every <= 5; ++every) {
        std::vector<float> x(16), decoded(16);
        for (std::size_t j = 0; j < x.size(); ++j) x[j] = j % static_cast<std::size_t>(every) == 0 ? -3.4e38f : 3.4e38f;
        std::vector<std::uint8_t> codes(16);
        INFO(to_string(type) << " " << to_string(rule) << ", every " << every);
        CHECK(std::isfinite(TrellisGroup(random_taps(2, 3, 4), rule, type).encode(x, codes)));
        CHECK(std::isfinite(CodebookGroup(test::random_table(2, 1), rule, type).encode(x, codes)));
      }
}
