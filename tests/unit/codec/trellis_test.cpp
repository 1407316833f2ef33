#include <kvq/codec/group_coder.h>
#include <kvq/codec/row_codec.h>
#include <kvq/solve/trellis_tables.h>

#include "support/compare.h"
#include "support/random_data.h"
#include "support/row_plans.h"
#include "support/row_reference.h"
#include "support/trellis_reference.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

using namespace kvq;

namespace {

constexpr TrellisSearch kSearches[] = {TrellisSearch::binary32, TrellisSearch::integer};

const char* name_of(TrellisSearch search) { return search == TrellisSearch::integer ? "integer" : "binary32"; }

TrellisTaps random_taps(int bits, int memory, std::uint64_t seed, TrellisSearch search = TrellisSearch::binary32) {
  TrellisTaps taps = test::trellis_coder({bits}, 8, ScaleRule::norm, ScaleType::fp32, seed).taps.at(0);
  taps.memory = memory;
  taps.search = search;
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

/// Codes that the codec finds for y.
std::vector<std::uint8_t> searched(const TrellisTaps& taps, std::span<const float> y) {
  std::vector<std::uint8_t> codes(y.size(), 255);
  TrellisGroup(taps, ScaleRule::rms, ScaleType::fp32).search(y, codes);
  return codes;
}

/// The memories that the format allows at one width.
int most_memory(int bits) { return std::min({8 / bits, 16 / bits - 1, 8}); }

std::size_t last_state(std::span<const std::uint8_t> codes, const TrellisTaps& taps) {
  std::size_t state = 0;
  for (std::size_t k = static_cast<std::size_t>(taps.memory); k > 0; --k)
    state = state << taps.bits | codes[codes.size() - k];
  return state;
}

/// Cost of the steps over a group of these codes from one state, and the state after them.
struct Path {
  std::int64_t cost;
  std::size_t end;
};
Path path_from(const test::IntegerCosts& costs, const TrellisTaps& taps, std::size_t state,
               std::span<const std::uint8_t> codes) {
  const std::size_t states = std::size_t{1} << (taps.bits * taps.memory);
  Path path{0, state};
  for (std::size_t j = 0; j < codes.size(); ++j) {
    const std::size_t window = path.end << taps.bits | codes[j];
    path.cost += costs.step(j, window);
    path.end = window % states;
  }
  return path;
}

/// The cost of the second run's cheapest path with these codes: from cost 0 in the seam's state, 32 U in any other.
std::int64_t cheapest_start(const test::IntegerCosts& costs, const TrellisTaps& taps, std::size_t seam,
                            std::span<const std::uint8_t> codes) {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (std::size_t state = 0; state < std::size_t{1} << (taps.bits * taps.memory); ++state)
    least = std::min(least, path_from(costs, taps, state, codes).cost + (state == seam ? 0 : 32 * costs.unit()));
  return least;
}

/// Least cost, over all paths of the search `integer`'s first run, of those that are in each state before the step of
/// j = 0. Uses costs up to and from that state, where the search traces one path back.
std::vector<std::int64_t> costs_through_seam(const test::IntegerCosts& costs, const TrellisTaps& taps, std::int64_t g) {
  const std::size_t states = std::size_t{1} << (taps.bits * taps.memory), fan = std::size_t{1} << taps.bits;
  const std::int64_t far = std::numeric_limits<std::int64_t>::max();
  std::vector<std::int64_t> before(states, 0), after(states, 0);
  const auto channel = [g](std::int64_t j) { return static_cast<std::size_t>((j + 40 * g) % g); };
  for (std::int64_t j = -40; j < 0; ++j) {
    std::vector<std::int64_t> next(states, far);
    for (std::size_t from = 0; from < states; ++from)
      for (std::size_t code = 0; code < fan; ++code) {
        std::int64_t& to = next[(from << taps.bits | code) % states];
        to = std::min(to, before[from] + costs.step(channel(j), from << taps.bits | code));
      }
    before = next;
  }
  for (std::int64_t j = (g < 96 ? 40 : g) - 1; j >= 0; --j) {
    std::vector<std::int64_t> next(states, far);
    for (std::size_t from = 0; from < states; ++from)
      for (std::size_t code = 0; code < fan; ++code)
        next[from] = std::min(
            next[from], after[(from << taps.bits | code) % states] + costs.step(channel(j), from << taps.bits | code));
    after = next;
  }
  for (std::size_t state = 0; state < states; ++state) before[state] += after[state];
  return before;
}

/// Codes, scale and decoded group are those of the reference.
void check_coded_as_text(const TrellisTaps& taps, ScaleRule rule, ScaleType type, const std::vector<float>& x) {
  const TrellisGroup group(taps, rule, type);
  std::vector<std::uint8_t> codes(x.size());
  std::vector<float> decoded(x.size());
  const float scale = group.encode(x, codes);
  group.decode(codes, scale, decoded);
  const test::ReferenceGroup expected = test::reference_trellis(taps, rule, type, x);
  CHECK(codes == expected.codes);
  CHECK(std::bit_cast<std::uint32_t>(scale) == std::bit_cast<std::uint32_t>(expected.scale));
  CHECK(test::first_bit_difference(decoded, expected.decoded) == "");
}

/// Squared error of Gaussian rows over their energy.
double error_of(TrellisTaps taps, TrellisSearch search, std::size_t channels, int rows) {
  taps.search = search;
  const TrellisGroup group(taps, ScaleRule::norm, ScaleType::fp16);
  std::vector<std::uint8_t> codes(channels);
  std::vector<float> decoded(channels);
  double error = 0.0, energy = 0.0;
  for (int row = 0; row < rows; ++row) {
    const std::vector<float> x = test::gaussian(channels, static_cast<std::uint64_t>(row) + 1000);
    group.decode(codes, group.encode(x, codes), decoded);
    for (std::size_t j = 0; j < channels; ++j) {
      const double e = static_cast<double>(x[j]) - static_cast<double>(decoded[j]);
      error += e * e;
      energy += static_cast<double>(x[j]) * static_cast<double>(x[j]);
    }
  }
  return error / energy;
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
    TrellisTaps taps = random_taps(bits, memory, random.bits());
    std::vector<float> x = test::gaussian(count, random.bits(), std::exp(3.0 * random.normal()));
    if (round % 5 == 0)
      for (float& value : x) value = std::round(value);  // makes ties
    for (const TrellisSearch search : kSearches) {
      taps.search = search;
      INFO("round " << round << ", bits " << bits << ", memory " << memory << ", channels " << count << ", "
                    << name_of(search));
      check_coded_as_text(taps, rule, type, x);
    }
  }
}

TEST_CASE("The integer search codes groups of 8 to 1024 channels as the text says, bit for bit", "[codec][trellis]") {
  test::Random random(19);
  int other_codes = 0;
  for (const int count : {8, 9, 13, 31, 32, 33, 39, 40, 41, 64, 79, 80, 81, 95, 96, 97, 127, 128, 200, 256, 1023, 1024})
    for (int bits = 1; bits <= 8; ++bits) {
      if (count > 128 && bits > 6) continue;  // 2^14 windows and more for each channel take too long
      const int memory = random.integer(1, count > 128 ? std::max(1, 6 / bits) : most_memory(bits));
      TrellisTaps taps = random_taps(bits, memory, random.bits(), TrellisSearch::integer);
      const auto round = static_cast<std::size_t>(count * 8 + bits);
      if (round % 3 == 0)
        for (float& theta : taps.theta) theta *= 4.0f;  // many are clamped
      std::vector<float> x =
          test::gaussian(static_cast<std::size_t>(count), random.bits(), std::exp(3.0 * random.normal()));
      if (round % 4 == 0)
        for (float& value : x) value = std::round(value);  // makes ties
      const ScaleRule rule = std::vector{ScaleRule::norm, ScaleRule::rms, ScaleRule::least_squares}[round % 3];
      const ScaleType type = std::vector{ScaleType::fp16, ScaleType::bf16, ScaleType::fp32}[(round / 3) % 3];
      INFO("bits " << bits << ", memory " << memory << ", channels " << count);
      check_coded_as_text(taps, rule, type, x);
      const std::vector<float> y = test::normalized(type, x).y;
      const std::vector<std::uint8_t> codes = searched(taps, y);
      taps.search = TrellisSearch::binary32;
      other_codes += searched(taps, y) != codes ? 1 : 0;
    }
  CHECK(other_codes > 20);  // the two searches are different ones
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
        for (const TrellisSearch search : kSearches) {
          taps.search = search;
          TrellisGroup(taps, ScaleRule::norm, ScaleType::fp32).encode(x, codes);
          CHECK(codes == test::reference_trellis(taps, ScaleRule::norm, ScaleType::fp32, x).codes);
        }
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

TEST_CASE("Integer costs are the squared error less that of zero, in units of 1 / U", "[codec][trellis]") {
  test::Random random(21);
  for (int round = 0; round < 200; ++round) {
    const int bits = random.integer(1, 5), memory = random.integer(1, most_memory(bits));
    const auto count = static_cast<std::size_t>(random.integer(8, 50));
    const TrellisTaps taps = random_taps(bits, memory, random.bits(), TrellisSearch::integer);
    std::vector<float> y = test::gaussian(count, random.bits());
    for (float& value : y) value = std::clamp(std::round(value * 256.0f) / 256.0f, -4.5f, 4.5f);
    std::vector<std::uint8_t> codes;
    for (std::size_t j = 0; j < count; ++j)
      codes.push_back(static_cast<std::uint8_t>(random.integer(0, (1 << bits) - 1)));
    std::vector<float> v(count);
    TrellisGroup(taps, ScaleRule::rms, ScaleType::fp32).values_of(codes, v);
    const test::IntegerCosts costs(taps, y);
    const auto unit = static_cast<double>(costs.unit());
    // Each F and X is rounded by half a unit at most, each theta by half of 1 / (64 U).
    const double taps_count = bits * (memory + 1), value_error = taps_count * 0.25 / (64.0 * unit);
    double exact = 0.0, bound = static_cast<double>(count) * 0.5 * (bits + memory + 1);
    for (std::size_t j = 0; j < count; ++j) {
      const auto a = static_cast<double>(y[j]), b = static_cast<double>(v[j]);
      exact += unit * (b * b - 2.0 * a * b);
      bound += unit * value_error * (2.0 * std::abs(a) + 2.0 * std::abs(b) + value_error) + 1e-4 * unit;
    }
    bool clamped = false;
    for (const float theta : taps.theta) clamped = clamped || std::abs(theta) > 2.5f;
    INFO("round " << round << ", bits " << bits << ", memory " << memory << ", channels " << count);
    if (!clamped) CHECK(std::abs(static_cast<double>(costs.closed(codes)) - exact) <= bound);
  }
}

TEST_CASE("Integer search, short groups: no path to the seam's state is cheaper than the one found",
          "[codec][trellis]") {
  int rows = 0, closed = 0;
  for (int bits = 1; bits <= 2; ++bits)
    for (int memory = 1; memory <= 3; ++memory)
      for (std::uint64_t seed = 0; seed < 8; ++seed) {
        TrellisTaps taps = random_taps(bits, memory, seed * 10 + 3, TrellisSearch::integer);
        if (seed >= 4)  // a start in another state, at a cost of 32 U, may then be cheaper
          for (float& theta : taps.theta) theta *= 3.0f;
        std::vector<float> y = test::normalized(ScaleType::fp32, test::gaussian(8, seed + 77)).y;
        if (seed >= 6)
          for (float& value : y) value *= 3.0f;
        const test::IntegerCosts costs(taps, y);
        const std::size_t seam = test::reference_seam(taps, y);
        const std::vector<std::uint8_t> codes = searched(taps, y);
        INFO("bits " << bits << ", memory " << memory << ", seed " << seed);
        REQUIRE(last_state(codes, taps) == seam);
        std::int64_t best = std::numeric_limits<std::int64_t>::max(), best_closed = best;
        for (std::uint64_t path = 0; path < std::uint64_t{1} << (8 * bits); ++path) {
          const std::vector<std::uint8_t> other = codes_of(path, bits, 8);
          if (last_state(other, taps) != seam) continue;
          best = std::min(best, cheapest_start(costs, taps, seam, other));
          best_closed = std::min(best_closed, costs.closed(other));
        }
        CHECK(cheapest_start(costs, taps, seam, codes) == best);
        CHECK(path_from(costs, taps, seam, codes).cost == costs.closed(codes));
        if (seed < 4) CHECK(costs.closed(codes) == best_closed);
        ++rows;
        closed += costs.closed(codes) == best_closed ? 1 : 0;
      }
  CHECK(rows == 48);
  CHECK(closed >= 24);
}

TEST_CASE("Integer search: the seam's state is that of the cheapest path of the first run", "[codec][trellis]") {
  test::Random random(23);
  for (const int count : {8, 9, 20, 39, 40, 41, 60, 95, 96, 97, 130})
    for (int bits = 1; bits <= 4; ++bits) {
      const int memory = random.integer(1, std::min(6 / bits, most_memory(bits)));
      const TrellisTaps taps = random_taps(bits, memory, random.bits(), TrellisSearch::integer);
      const std::vector<float> y = test::gaussian(static_cast<std::size_t>(count), random.bits());
      const std::size_t seam = last_state(searched(taps, y), taps);
      const std::vector<std::int64_t> through = costs_through_seam(test::IntegerCosts(taps, y), taps, count);
      INFO("bits " << bits << ", memory " << memory << ", channels " << count);
      CHECK(through[seam] == *std::min_element(through.begin(), through.end()));
    }
}

TEST_CASE("Integer search: y beyond 4.5 and theta beyond 2.5 are those bounds", "[codec][trellis]") {
  test::Random random(25);
  const float infinity = std::numeric_limits<float>::infinity();
  for (const int count : {8, 17, 40, 95, 96, 128})
    for (int bits = 1; bits <= 4; ++bits) {
      TrellisTaps taps =
          random_taps(bits, random.integer(1, std::min(3, most_memory(bits))), random.bits(), TrellisSearch::integer);
      std::vector<float> y = test::gaussian(static_cast<std::size_t>(count), random.bits(), 2.0), bounded = y;
      const float far[] = {infinity, -infinity, 3.4e38f, -3.4e38f, 4.5f, -4.5f, 1e10f, -4.501f};
      for (std::size_t j = 0; j < y.size(); j += 3) y[j] = far[random.integer(0, 7)];
      for (std::size_t j = 0; j < y.size(); ++j) bounded[j] = std::clamp(y[j], -4.5f, 4.5f);
      taps.theta[0] = 7.5f;
      taps.theta.back() = -1e30f;
      TrellisTaps small = taps;
      for (float& theta : small.theta) theta = std::clamp(theta, -2.5f, 2.5f);
      INFO("bits " << bits << ", memory " << taps.memory << ", channels " << count);
      const std::vector<std::uint8_t> codes = searched(taps, y);
      CHECK(codes == searched(small, bounded));
      CHECK(codes == test::reference_codes(taps, y));
    }
}

TEST_CASE("Integer search: halves of 1/256 are rounded to even", "[codec][trellis]") {
  test::Random random(26);
  for (int round = 0; round < 40; ++round) {
    const int bits = random.integer(1, 4);
    const TrellisTaps taps = random_taps(bits, 1, random.bits(), TrellisSearch::integer);
    std::vector<float> y(static_cast<std::size_t>(random.integer(8, 120))), even = y;
    for (std::size_t j = 0; j < y.size(); ++j) {
      const int n = random.integer(-700, 700);
      y[j] = static_cast<float>(2 * n + 1) / 512.0f;
      even[j] = static_cast<float>(n % 2 == 0 ? n : n + 1) / 256.0f;
    }
    INFO("round " << round);
    CHECK(searched(taps, y) == searched(taps, even));
    CHECK(searched(taps, y) == test::reference_codes(taps, y));
  }
}

TEST_CASE("Integer search: halves of a cost are rounded up", "[codec][trellis]") {
  // a = 512, 256, 128, 128 at U = 80: F[0][0] and F[0][3] are (768^2 + 256^2) / (16384 U) = 1/2 before rounding.
  const TrellisTaps taps{
      .bits = 2,
      .memory = 1,
      .search = TrellisSearch::integer,
      .theta = {0.1f, 0.05f, 0.025f, 0.025f},
  };
  test::Random random(28);
  for (int round = 0; round < 40; ++round) {
    std::vector<float> y(static_cast<std::size_t>(random.integer(8, 120)));
    for (float& value : y) value = static_cast<float>(random.uniform(-0.1, 0.1));
    INFO("round " << round);
    CHECK(searched(taps, y) == test::reference_codes(taps, y));
  }
}

TEST_CASE("Integer search: paths that close badly, on both sides of 96 channels", "[codec][trellis]") {
  // With long memories and small y the cheapest paths repeat a pattern whose length need not divide the group's.
  // Closing then costs something, and from 96 channels on many paths begin in another state than they end in.
  test::Random random(30);
  for (const int count : {90, 94, 95, 96, 97, 98, 127, 128})
    for (int round = 0; round < 30; ++round) {
      const int bits = 1 + round % 2;
      TrellisTaps taps{.bits = bits, .memory = bits == 1 ? 7 : 4, .search = TrellisSearch::integer, .theta = {}};
      for (int i = 0; i < bits * (taps.memory + 1); ++i) taps.theta.push_back(random.integer(0, 1) == 0 ? 1.0f : -1.0f);
      const std::vector<float> y = test::gaussian(static_cast<std::size_t>(count), random.bits(), 0.1);
      INFO("round " << round << ", bits " << bits << ", channels " << count);
      CHECK(searched(taps, y) == test::reference_codes(taps, y));
    }
}

TEST_CASE("Integer search: a start in another state than the seam's costs 32 U", "[codec][trellis]") {
  // Taps and y so large that closing a short group may cost more than that.
  test::Random random(32);
  for (int round = 0; round < 3000; ++round) {
    const int bits = random.integer(1, 2), memory = random.integer(2, 6 / bits);
    TrellisTaps taps = random_taps(bits, memory, random.bits(), TrellisSearch::integer);
    for (float& theta : taps.theta) theta = static_cast<float>(random.uniform(-2.5, 2.5));
    std::vector<float> y(static_cast<std::size_t>(random.integer(8, 12)));
    for (float& value : y) value = static_cast<float>(random.uniform(-4.5, 4.5));
    INFO("round " << round << ", bits " << bits << ", memory " << memory << ", channels " << y.size());
    CHECK(searched(taps, y) == test::reference_codes(taps, y));
  }
}

TEST_CASE("The integer search stays exact with the largest taps and channels", "[codec][trellis]") {
  test::Random random(23);
  for (const int bits : {1, 2, 3, 4, 8})
    for (const int memory : {1, most_memory(bits)})
      for (const int count : {40, 128}) {
        TrellisTaps taps{.bits = bits,
                         .memory = memory,
                         .search = TrellisSearch::integer,
                         .theta = std::vector<float>(static_cast<std::size_t>(bits * (memory + 1)))};
        const bool alternates = random.integer(0, 1) == 0;
        for (std::size_t i = 0; i < taps.theta.size(); ++i) taps.theta[i] = alternates && i % 2 != 0 ? -9.0f : 9.0f;
        std::vector<float> y(static_cast<std::size_t>(count));  // all are clamped
        for (float& value : y) value = random.integer(0, 2) == 0 ? -1e9f : 1e9f;
        INFO("bits " << bits << ", memory " << memory << ", channels " << count << ", alternates " << alternates);
        CHECK(searched(taps, y) == test::reference_codes(taps, y));
      }
}

TEST_CASE("Integer search, equal costs: the smallest dropped code, the smallest last state", "[codec][trellis]") {
  test::Random random(27);
  for (const int count : {8, 39, 40, 41, 95, 96, 97, 128})
    for (int bits = 1; bits <= 8; ++bits) {
      const auto size = static_cast<std::size_t>(count);
      TrellisTaps taps{
          .bits = bits,
          .memory = random.integer(1, std::min(3, most_memory(bits))),
          .search = TrellisSearch::integer,
          .theta = {},
      };
      taps.theta.assign(static_cast<std::size_t>(bits * (taps.memory + 1)), 0.0f);
      INFO("bits " << bits << ", memory " << taps.memory << ", channels " << count);
      // No theta: all paths cost nothing, so the path ends in state 0 and drops code 0 everywhere.
      CHECK(searched(taps, test::gaussian(size, random.bits())) == std::vector<std::uint8_t>(size, 0));
      // No energy: no path is searched.
      std::vector<std::uint8_t> codes(size);
      CHECK(TrellisGroup(taps, ScaleRule::norm, ScaleType::fp16).encode(std::vector<float>(size, 0.0f), codes) == 0.0f);
      CHECK(codes == std::vector<std::uint8_t>(size, static_cast<std::uint8_t>(1 << (bits - 1))));
      // Taps so small that they are rounded to nothing, as are the gains.
      for (float& theta : taps.theta) theta = 1e-7f;
      CHECK(searched(taps, test::gaussian(size, random.bits())) == std::vector<std::uint8_t>(size, 0));
      // The oldest code alone counts; y on a grid.
      taps.theta.assign(taps.theta.size(), 0.0f);
      taps.theta.back() = 1.0f;
      std::vector<float> y(size);
      for (float& value : y) value = static_cast<float>(random.integer(-1, 1));
      CHECK(searched(taps, y) == test::reference_codes(taps, y));
    }
}

TEST_CASE("Integer search: codes do not change with a power of two", "[codec][trellis]") {
  test::Random random(29);
  for (const int count : {8, 32, 97})
    for (const ScaleType type : {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32})
      for (const int power : {-10, -3, 1, 12}) {
        const TrellisTaps taps = random_taps(2, 3, random.bits(), TrellisSearch::integer);
        std::vector<float> x = test::gaussian(static_cast<std::size_t>(count), random.bits()), scaled = x;
        for (float& value : scaled) value = std::ldexp(value, power);
        const TrellisGroup group(taps, ScaleRule::rms, type);
        std::vector<std::uint8_t> codes(x.size()), again(x.size());
        const float d = group.encode(x, codes);
        CHECK(group.encode(scaled, again) == std::ldexp(d, power));
        CHECK(codes == again);
      }
}

TEST_CASE("Integer search: groups whose energy overflows or underflows are coded as the text says",
          "[codec][trellis]") {
  for (const ScaleType type : {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32})
    for (const ScaleRule rule : {ScaleRule::norm, ScaleRule::rms, ScaleRule::least_squares})
      for (const std::size_t count : {8u, 50u, 96u, 130u}) {
        std::vector<float> x = test::gaussian(count, count + 5, 7e37);
        INFO(to_string(type) << " " << to_string(rule) << ", channels " << count);
        check_coded_as_text(random_taps(2, 3, 4, TrellisSearch::integer), rule, type, x);
        for (float& value : x) value = value / 7e37f * 1e-21f;  // squares are subnormal, and d of fp16 is 0
        check_coded_as_text(random_taps(2, 3, 4, TrellisSearch::integer), rule, type, x);
      }
}

TEST_CASE("Mixed rows of the integer search are coded as the text says, with infinite y too", "[codec][trellis][row]") {
  test::Random random(31);
  int infinite = 0, trellis_segments = 0;
  for (int round = 0; round < 90; ++round) {
    const int dim = random.integer(8, 200);
    const ScaleType type =
        std::vector{ScaleType::fp16, ScaleType::bf16, ScaleType::fp32}[static_cast<std::size_t>(random.integer(0, 2))];
    TensorPlan plan = test::mixed_plan(test::descending_widths(random, dim), dim, 2, type, random.bits());
    for (TrellisTaps& taps : std::get<TrellisCoder>(plan.coder).taps) taps.search = TrellisSearch::integer;
    if (round % 3 != 0) test::add_row_scale(plan, random.bits());
    if (round % 5 == 0)  // with rows this large and d of fp16 at its end, such gains make y infinite
      for (float& gain : plan.allocation->segment_gain)
        if (gain != 1.0f && random.integer(0, 1) == 0) gain = kLeastChannelScale;
    std::vector<float> row = test::gaussian(static_cast<std::size_t>(dim), random.bits(), round % 5 == 0 ? 7e37 : 2.0);
    if (round % 9 == 4)
      for (float& value : row) value = test::any_finite(random);
    INFO("round " << round << ", dim " << dim);
    const RowCodec codec(plan, 0, dim);
    std::vector<std::uint8_t> codes(row.size());
    std::vector<float> numbers(static_cast<std::size_t>(codec.num_numbers())), decoded(row.size());
    codec.encode(row, codes, numbers);
    codec.decode(codes, numbers, decoded);
    const test::ReferenceBytes expected = test::reference_plan_row(plan, 0, 0, row);
    CHECK(codes == expected.codes);
    CHECK(test::first_bit_difference(numbers, expected.numbers) == "");
    CHECK(test::first_bit_difference(decoded, expected.decoded) == "");
    for (const ChannelGroup& group : codec.groups()) {
      if (!std::holds_alternative<TrellisGroup>(group.coder)) continue;
      ++trellis_segments;
      // No d of fp16 exceeds 65504, so these y are infinite.
      if (codec.row_scale() != nullptr && type == ScaleType::fp16)
        for (int j = group.first; j < group.first + group.count; ++j)
          infinite += std::isinf(row[static_cast<std::size_t>(j)] / (group.gain * 65504.0f)) ? 1 : 0;
    }
  }
  CHECK(trellis_segments > 50);
  CHECK(infinite > 20);
}

TEST_CASE("The integer search finds codes about as good as those of binary32", "[codec][trellis]") {
  for (const auto& [channels, bound] : {std::pair{128, 1.004}, std::pair{32, 1.01}, std::pair{16, 1.01}})
    for (int bits = 2; bits <= 4; ++bits)
      for (int memory = 1; memory <= 3; ++memory) {
        const std::vector<TrellisTaps> taps = trellis_taps(bits, memory, 1 << 20);
        if (taps.at(0).memory != memory) continue;
        const int rows = channels == 128 ? 300 : 600;
        const double binary32 = error_of(taps[0], TrellisSearch::binary32, static_cast<std::size_t>(channels), rows);
        const double integer = error_of(taps[0], TrellisSearch::integer, static_cast<std::size_t>(channels), rows);
        INFO("bits " << bits << ", memory " << memory << ", channels " << channels << ": " << integer << ", binary32 "
                     << binary32 << ", ratio " << integer / binary32);
        CHECK(integer <= bound * binary32);
      }
}
