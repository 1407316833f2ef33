#include <kvq/plan/cache_layout.h>
#include <kvq/solve/bit_budget.h>

#include "support/error_of.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

using namespace kvq;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;
using Bits = std::vector<std::uint8_t>;

namespace {

int spent(const Bits& bits) { return std::accumulate(bits.begin(), bits.end(), 0); }

double gain(double score, int bits, const RateLaw& law) {
  return score * (law[static_cast<std::size_t>(bits)] - law[static_cast<std::size_t>(bits) + 1]);
}

/// Random scores over many orders of magnitude, as energies of RoPE blocks have.
std::vector<double> scores_of(int blocks, std::uint64_t seed) {
  std::vector<double> scores = test::gaussian_double(static_cast<std::size_t>(blocks), seed, 2.0);
  for (double& score : scores) score = std::exp(score);
  return scores;
}

/// A convex law whose factors differ from 4, like measured distortions of coders.
const RateLaw& measured_law() {
  static const RateLaw law = {1.0, 0.3634, 0.1175, 0.03454, 0.009497, 0.002499, 0.0006, 0.00016, 0.00004};
  return law;
}

/// Bytes of a row whose blocks have these widths, computed by the layout.
int bytes_of(Bits blocks, const RowBudget& budget) {
  std::sort(blocks.rbegin(), blocks.rend());
  Bits channels;
  for (const std::uint8_t width : blocks)
    channels.insert(channels.end(), static_cast<std::size_t>(budget.channels_per_block), width);
  return mixed_row_layout(channels.data(), static_cast<int>(channels.size()), budget.scale_bytes, budget.index_bytes)
      .row_bytes;
}

/// Calls `visit` with every choice of a width for each block.
void every_allocation(std::size_t blocks, const std::vector<int>& widths,
                      const std::function<void(const Bits&)>& visit) {
  std::vector<std::size_t> digit(blocks, 0);
  for (;;) {
    Bits bits;
    for (const std::size_t i : digit) bits.push_back(static_cast<std::uint8_t>(widths[i]));
    visit(bits);
    std::size_t at = 0;
    while (at < blocks && ++digit[at] == widths.size()) digit[at++] = 0;
    if (at == blocks) return;
  }
}

std::vector<int> widths_between(int least, int most) {
  std::vector<int> widths;
  for (const int width : {0, 1, 2, 3, 4, 8})
    if (width >= least && width <= most) widths.push_back(width);
  return widths;
}

}  // namespace

TEST_CASE("The paper's law is 4^-b, and J is the sum of scores times the law", "[solve][bits]") {
  for (std::size_t b = 0; b < 9; ++b) CHECK(paper_law()[b] == std::pow(4.0, -static_cast<double>(b)));
  CHECK(allocation_objective(std::vector<double>{16, 4, 3}, Bits{2, 1, 0}) == 16.0 / 16 + 4.0 / 4 + 3.0);
  CHECK(allocation_objective(std::vector<double>{2}, Bits{3}, measured_law()) == 2 * measured_law()[3]);
  CHECK(allocation_objective(std::vector<double>{}, Bits{}) == 0.0);
}

TEST_CASE("A mean of bits is rounded down to a whole budget", "[solve][bits]") {
  CHECK(total_bits(3.0, 64) == 192);
  CHECK(total_bits(2.5, 64) == 160);
  CHECK(total_bits(2.5, 3) == 7);
  CHECK(total_bits(2.99, 1) == 2);
  CHECK(total_bits(1.0 / 3.0, 64) == 21);
  CHECK(total_bits(2.0 + 63.0 / 64.0, 64) == 191);
  CHECK(total_bits(0.0, 64) == 0);
}

TEST_CASE("The paper's algorithm, done by hand", "[solve][bits]") {
  // The gain of the next bit is s 4^-b 3/4. From 1 bit on, 64 gets bits until its gain, 64 4^-b, is below the gains of
  // the others.
  CHECK(greedy_allocation(std::vector<double>{64, 4, 1}, 3, 1, 8) == Bits{1, 1, 1});
  CHECK(greedy_allocation(std::vector<double>{64, 4, 1}, 4, 1, 8) == Bits{2, 1, 1});
  CHECK(greedy_allocation(std::vector<double>{64, 4, 1}, 5, 1, 8) == Bits{3, 1, 1});  // gains 4 and 1: the first block
  CHECK(greedy_allocation(std::vector<double>{64, 4, 1}, 6, 1, 8) ==
        Bits{4, 1, 1});  // gains 1 and 1: the tie goes to the lowest index
  CHECK(greedy_allocation(std::vector<double>{64, 4, 1}, 7, 1, 8) == Bits{4, 2, 1});
  CHECK(greedy_allocation(std::vector<double>{64, 4, 1}, 8, 1, 4) ==
        Bits{4, 3, 1});  // the first block is full; gains 1/4 and 1/4
  CHECK(greedy_allocation(std::vector<double>{64, 4, 1}, 9, 1, 4) == Bits{4, 3, 2});
}

TEST_CASE("Equal scores: the lowest indices get the rest", "[solve][bits]") {
  for (int blocks = 1; blocks <= 9; ++blocks)
    for (int budget = blocks; budget <= 8 * blocks; ++budget) {
      const Bits bits = greedy_allocation(std::vector<double>(static_cast<std::size_t>(blocks), 0.7), budget, 1, 8);
      for (int i = 0; i < blocks; ++i)
        REQUIRE(bits[static_cast<std::size_t>(i)] == budget / blocks + (i < budget % blocks ? 1 : 0));
    }
  // Equal gains of unequal scores: the next bit of 4 at one bit more gains as much as the next bit of 1.
  CHECK(greedy_allocation(std::vector<double>{1, 4}, 3, 1, 8) == Bits{1, 2});
  CHECK(greedy_allocation(std::vector<double>{1, 4}, 4, 1, 8) == Bits{2, 2});
  CHECK(greedy_allocation(std::vector<double>{4, 1}, 4, 1, 8) == Bits{3, 1});
}

TEST_CASE("The whole budget is spent whatever the scores, between the two limits", "[solve][bits]") {
  test::Random random(5);
  for (int round = 0; round < 400; ++round) {
    const int blocks = random.integer(1, 70), least = random.integer(0, 4), most = random.integer(least, 8);
    const int budget = random.integer(blocks * least, blocks * most);
    std::vector<double> scores = scores_of(blocks, static_cast<std::uint64_t>(round));
    for (double& score : scores)
      if (random.integer(0, 3) == 0) score = random.integer(0, 1) == 0 ? 0.0 : 5e-324;
    const Bits bits = greedy_allocation(scores, budget, least, most, round % 2 == 0 ? paper_law() : measured_law());
    REQUIRE(bits.size() == scores.size());
    CHECK(spent(bits) == budget);
    CHECK(*std::min_element(bits.begin(), bits.end()) >= least);
    CHECK(*std::max_element(bits.begin(), bits.end()) <= most);
  }
}

TEST_CASE("Blocks of score zero get bits only when the others are full, and then evenly", "[solve][bits]") {
  CHECK(greedy_allocation(std::vector<double>{0, 5, 0}, 8, 1, 8) == Bits{1, 6, 1});
  CHECK(greedy_allocation(std::vector<double>{0, 5, 0}, 10, 1, 8) == Bits{1, 8, 1});
  const Bits left = greedy_allocation(std::vector<double>{0, 5, 0, 0}, 8 + 3 + 7, 1, 8);
  CHECK(left[1] == 8);
  const auto [low, high] = std::minmax({left[0], left[2], left[3]});
  CHECK(high - low <= 1);
  for (int budget = 6; budget <= 48; ++budget) {
    const Bits all = greedy_allocation(std::vector<double>(6, 0.0), budget, 1, 8);
    CHECK(spent(all) == budget);
    CHECK(*std::max_element(all.begin(), all.end()) - *std::min_element(all.begin(), all.end()) <= 1);
  }
}

TEST_CASE("There is a price of a bit that every block agrees to", "[solve][bits]") {
  for (std::uint64_t seed = 0; seed < 40; ++seed)
    for (const RateLaw* law : {&paper_law(), &measured_law()})
      for (const double mean : {1.5, 2.0, 2.5, 3.0, 4.25}) {
        const std::vector<double> scores = scores_of(64, seed);
        const Bits bits = greedy_allocation(scores, total_bits(mean, 64), 1, 8, *law);
        double least_given = HUGE_VAL, most_next = 0.0;
        for (std::size_t i = 0; i < bits.size(); ++i) {
          if (bits[i] > 1) least_given = std::min(least_given, gain(scores[i], bits[i] - 1, *law));
          if (bits[i] < 8) most_next = std::max(most_next, gain(scores[i], bits[i], *law));
        }
        INFO("seed " << seed << ", mean " << mean);
        CHECK(spent(bits) == total_bits(mean, 64));
        CHECK(least_given >= most_next);
      }
}

TEST_CASE("Another law gives another allocation, optimal for it", "[solve][bits]") {
  const std::vector<double> scores = {20.0, 2.0, 1.0};
  // With gains of 5, 1, 0.1, ... the last block's first bit comes before the first block's third.
  const RateLaw steep = {6.1, 1.1, 0.1, 0.05, 0.04, 0.03, 0.02, 0.01, 0.0};
  CHECK(greedy_allocation(scores, 4, 0, 8, steep) == Bits{2, 1, 1});
  CHECK(greedy_allocation(scores, 4, 0, 8) == Bits{3, 1, 0});
  for (int budget = 0; budget <= 12; ++budget)
    for (const RateLaw* law : {&steep, &measured_law()}) {
      double best = HUGE_VAL;
      every_allocation(3, {0, 1, 2, 3, 4}, [&](const Bits& bits) {
        if (spent(bits) == budget) best = std::min(best, allocation_objective(scores, bits, *law));
      });
      CHECK(allocation_objective(scores, greedy_allocation(scores, budget, 0, 4, *law), *law) ==
            Approx(best).epsilon(1e-12));
    }
}

TEST_CASE("A budget of bits out of range is refused with the range", "[solve][bits]") {
  const std::vector<double> scores = {1, 2, 3};
  const auto text = [&](int budget, int least, int most) {
    return test::error_text([&] { greedy_allocation(scores, budget, least, most); });
  };
  CHECK(text(3, 1, 8) == "no error");
  CHECK(text(24, 1, 8) == "no error");
  CHECK_THAT(text(2, 1, 8), StartsWith("usage: ") && Contains("3") && Contains("24"));
  CHECK_THAT(text(25, 1, 8), StartsWith("usage: ") && Contains("3") && Contains("24"));
  CHECK_THAT(text(-1, 0, 4), StartsWith("usage: ") && Contains("0") && Contains("12"));
  CHECK_THAT(text(13, 0, 4), StartsWith("usage: ") && Contains("0") && Contains("12"));
}

TEST_CASE("A byte budget is spent as well as any allocation could", "[solve][bytes]") {
  test::Random random(17);
  int checked = 0;
  for (int round = 0; round < 120; ++round) {
    const int blocks = random.integer(1, 6);
    RowBudget budget{
        .scale_bytes = random.integer(0, 1) == 0 ? 2 : 4,
        .index_bytes = random.integer(0, 2),
        .channels_per_block = random.integer(0, 3) == 0   ? 1
                              : random.integer(0, 1) == 0 ? 2
                                                          : random.integer(3, 9),
        .min_bits = random.integer(0, 2),
        .max_bits = random.integer(0, 1) == 0 ? 8 : 4,
    };
    const std::vector<double> scores = scores_of(blocks, static_cast<std::uint64_t>(round) + 50);
    const RateLaw& law = round % 3 == 0 ? measured_law() : paper_law();
    const int least =
        bytes_of(Bits(static_cast<std::size_t>(blocks), static_cast<std::uint8_t>(budget.min_bits)), budget);
    const int most =
        bytes_of(Bits(static_cast<std::size_t>(blocks), static_cast<std::uint8_t>(budget.max_bits)), budget) + 12;
    // The smallest cost for each size.
    std::vector<double> best(static_cast<std::size_t>(most) + 1, HUGE_VAL);
    every_allocation(static_cast<std::size_t>(blocks), widths_between(budget.min_bits, budget.max_bits),
                     [&](const Bits& bits) {
                       const int bytes = bytes_of(bits, budget);
                       if (bytes > most) return;
                       double& entry = best[static_cast<std::size_t>(bytes)];
                       entry = std::min(entry, allocation_objective(scores, bits, law));
                     });
    for (std::size_t size = 1; size < best.size(); ++size) best[size] = std::min(best[size], best[size - 1]);
    for (budget.row_bytes = least; budget.row_bytes <= most; budget.row_bytes += random.integer(1, 4)) {
      INFO("blocks " << blocks << " of " << budget.channels_per_block << ", bytes " << budget.row_bytes << ", scales "
                     << budget.scale_bytes << ", index " << budget.index_bytes << ", bits " << budget.min_bits << " to "
                     << budget.max_bits << ", round " << round);
      const Bits bits = byte_allocation(scores, budget, law);
      REQUIRE(bits.size() == scores.size());
      CHECK(bytes_of(bits, budget) <= budget.row_bytes);
      for (const std::uint8_t width : bits) {
        CHECK(width >= budget.min_bits);
        CHECK(width <= budget.max_bits);
        CHECK((width <= 4 || width == 8));
      }
      CHECK(allocation_objective(scores, bits, law) ==
            Approx(best[static_cast<std::size_t>(budget.row_bytes)]).epsilon(1e-12));
      ++checked;
    }
  }
  CHECK(checked > 500);
}

TEST_CASE("A row of a head of 128 channels never exceeds its bytes, and larger scores get no fewer bits",
          "[solve][bytes]") {
  for (const int per_block : {1, 2})
    for (const int row_bytes : {20, 36, 44, 50, 52, 68, 100, 132, 200}) {
      const RowBudget budget{.row_bytes = row_bytes, .channels_per_block = per_block};
      const std::vector<double> scores = scores_of(128 / per_block, static_cast<std::uint64_t>(row_bytes));
      const Bits bits = byte_allocation(scores, budget);
      INFO("bytes " << row_bytes << ", channels per block " << per_block);
      CHECK(bytes_of(bits, budget) <= row_bytes);
      for (std::size_t i = 0; i < bits.size(); ++i)
        for (std::size_t j = 0; j < bits.size(); ++j)
          if (scores[i] > scores[j]) REQUIRE(bits[i] >= bits[j]);
    }
}

TEST_CASE("A byte budget that not even the least widths fit is refused with what they take", "[solve][bytes]") {
  const std::vector<double> scores(64, 1.0);
  const auto text = [&](RowBudget budget) { return test::error_text([&] { byte_allocation(scores, budget); }); };
  // 128 channels of 1 bit and one scale: 18 bytes.
  CHECK(text({.row_bytes = 18}) == "no error");
  CHECK_THAT(text({.row_bytes = 17}), StartsWith("usage: ") && Contains("18"));
  CHECK_THAT(text({.row_bytes = 33, .min_bits = 2}), StartsWith("usage: ") && Contains("34"));
  CHECK_THAT(text({.row_bytes = 35, .scale_bytes = 4, .min_bits = 2}), StartsWith("usage: ") && Contains("36"));
  CHECK_THAT(text({.row_bytes = 19, .index_bytes = 2}), StartsWith("usage: ") && Contains("20"));
  CHECK(text({.row_bytes = 0, .min_bits = 0}) == "no error");
  CHECK(byte_allocation(scores, {.row_bytes = 0, .min_bits = 0}) == Bits(64, 0));
  CHECK_THAT(text({.row_bytes = -1, .min_bits = 0}), StartsWith("usage: "));
  CHECK(text({.row_bytes = 2, .index_bytes = 2, .min_bits = 0}) == "no error");
  CHECK_THAT(text({.row_bytes = 1, .index_bytes = 2, .min_bits = 0}), StartsWith("usage: ") && Contains("2"));
}
