#include <kvq/plan/allocation_stats.h>

#include <catch2/catch.hpp>

#include <cmath>
#include <random>
#include <vector>

using namespace kvq;
using Widths = std::vector<std::uint8_t>;

namespace {

AllocationDistance distance(const Widths& bits, const Widths& reference, const std::vector<float>& scores) {
  AllocationDistance d;
  d.add(bits, reference, scores);
  return d;
}

}  // namespace

TEST_CASE("a histogram counts every width from 0 to 8", "[plan]") {
  CHECK(width_histogram(Widths{8, 0, 2, 2, 8, 2}) == WidthHistogram{1, 0, 3, 0, 0, 0, 0, 0, 2});
  CHECK(width_histogram({}) == WidthHistogram{});
  CHECK_THROWS(width_histogram(Widths{9}));
}

TEST_CASE("entropy is 0 for one width, log2 n for n equally frequent ones", "[plan]") {
  CHECK(width_entropy(WidthHistogram{}) == 0.0);
  CHECK(width_entropy(width_histogram(Widths{3, 3, 3})) == 0.0);
  CHECK_FALSE(std::signbit(width_entropy(width_histogram(Widths{3, 3, 3}))));
  CHECK(width_entropy(width_histogram(Widths{1, 4})) == 1.0);
  CHECK(width_entropy(width_histogram(Widths{1, 2, 3, 4, 5, 6, 7, 8})) == 3.0);
  // 1/2 * 1 + 1/4 * 2 + 1/8 * 3 + 1/8 * 3
  CHECK(width_entropy(width_histogram(Widths{2, 2, 2, 2, 3, 3, 1, 4})) == 1.75);
}

TEST_CASE("distinct widths are those that occur, width 0 too", "[plan]") {
  CHECK(distinct_widths(WidthHistogram{}) == 0);
  CHECK(distinct_widths(width_histogram(Widths{2, 2})) == 1);
  CHECK(distinct_widths(width_histogram(Widths{0, 2, 8, 8})) == 3);
}

TEST_CASE("statistics count blocks where blocks got the bits, else channels", "[plan]") {
  BitAllocation allocation{.unit = "channel", .channel_bits = {3, 2, 2, 1}};
  CHECK(allocated_widths(allocation).size() == 4);
  allocation.unit = "rope_block";
  allocation.block_bits = {2, 2};
  CHECK(allocated_widths(allocation).data() == allocation.block_bits.data());
  CHECK(allocated_widths(allocation).size() == 2);
}

TEST_CASE("the widths of a model: shares of all slots, entropies over layers", "[plan]") {
  // Entropies 1, 0, 1.75 and 1 bits: mean 0.9375, and the mean square of the differences from it is 0.38671875.
  BitAllocation layers[] = {{.unit = "rope_block", .channel_bits = {}, .block_bits = {1, 4}},
                            {.unit = "rope_block", .channel_bits = {}, .block_bits = {3, 3}},
                            {.unit = "rope_block", .channel_bits = {}, .block_bits = {2, 2, 2, 2, 3, 3, 1, 4}},
                            {.unit = "rope_block", .channel_bits = {}, .block_bits = {8, 1, 8, 1}}};
  const std::vector<LayerWidths> all = {{2, &layers[0]}, {5, &layers[1]}, {7, &layers[2]}, {9, &layers[3]}};
  const ModelWidths model = model_widths(all);
  CHECK(model.layers == 4);
  CHECK(model.of_blocks);
  CHECK(model.histogram == WidthHistogram{0, 4, 4, 4, 2, 0, 0, 0, 2});
  CHECK(model.share(2) == 0.25);
  CHECK(model.share(8) == 0.125);
  CHECK(model.share(5) == 0.0);
  CHECK(model.mean_kinds == 2.25);
  CHECK(model.mean_entropy == 0.9375);
  CHECK(model.entropy_deviation == Approx(std::sqrt(0.38671875)));
  CHECK(model.highest.layer == 7);
  CHECK(model.highest.entropy == 1.75);
  CHECK(model.lowest.layer == 5);
  CHECK(model.lowest.entropy == 0.0);
}

TEST_CASE("the widths of a model count channels if any layer has no blocks", "[plan]") {
  const BitAllocation blocks{.unit = "rope_block", .channel_bits = {1, 1, 4, 4}, .block_bits = {1, 4}};
  const BitAllocation channels{.unit = "channel", .channel_bits = {2, 2, 2, 2}};
  const std::vector<LayerWidths> all = {{0, &blocks}, {1, &channels}};
  const ModelWidths model = model_widths(all);
  CHECK(!model.of_blocks);
  CHECK(model.histogram == WidthHistogram{0, 2, 4, 0, 2, 0, 0, 0, 0});
  CHECK(model.highest.layer == 0);
  CHECK_THROWS(model_widths({}));
}

TEST_CASE("an allocation has no distance from itself", "[plan]") {
  const Widths bits = {8, 3, 0, 5};
  const AllocationDistance d = distance(bits, bits, {1e30f, 3.0f, 0.1f, 0.0f});
  CHECK(d.hamming() == 0.0);
  CHECK(d.high_bit_jaccard() == 1.0);
  CHECK(d.regret() == 0.0);
}

TEST_CASE("the distances of a hand-computed pair", "[plan]") {
  // Slots 0 and 3 changed. Four bits or more: {0, 1} here, {1, 3} there. Costs by the reference's scores:
  // there 64/64 + 256/256 + 16/16 + 256/256 = 4, here 64/256 + 1 + 1 + 256/64 = 6.25.
  const AllocationDistance d = distance({4, 4, 2, 3}, {3, 4, 2, 4}, {64.0f, 256.0f, 16.0f, 256.0f});
  CHECK(d.slots == 4);
  CHECK(d.changed == 2);
  CHECK(d.hamming() == 0.5);
  CHECK(d.high_bit_jaccard() == Approx(1.0 / 3.0));
  CHECK(d.reference_cost == 4.0);
  CHECK(d.excess == 2.25);
  CHECK(d.regret() == 0.5625);
}

TEST_CASE("the overlap of protected slots is 1 where nobody protects any, 0 where only one does", "[plan]") {
  CHECK(distance({1, 2, 3}, {3, 2, 1}, {1.0f, 1.0f, 1.0f}).high_bit_jaccard() == 1.0);
  CHECK(distance({4, 2, 3}, {3, 2, 3}, {1.0f, 1.0f, 1.0f}).high_bit_jaccard() == 0.0);
}

TEST_CASE("regret is negative for more bits, and 0 without energy", "[plan]") {
  CHECK(distance({3}, {2}, {5.0f}).regret() == -0.75);
  CHECK(distance({0}, {1}, {5.0f}).regret() == 3.0);
  CHECK(distance({1}, {8}, {0.0f}).regret() == 0.0);
}

TEST_CASE("no slots have no distance", "[plan]") {
  const AllocationDistance d;
  CHECK(d.hamming() == 0.0);
  CHECK(d.high_bit_jaccard() == 1.0);
  CHECK(d.regret() == 0.0);
}

TEST_CASE("distances of unequal numbers of slots are a mistake", "[plan]") {
  CHECK_THROWS(distance({1}, {1, 2}, {1.0f}));
  CHECK_THROWS(distance({1}, {1}, {}));
}

TEST_CASE("distances of layers merge to that of all slots", "[plan]") {
  std::mt19937 random(17);
  Widths bits, reference;
  std::vector<float> scores;
  AllocationDistance merged;
  for (const std::size_t slots : {1u, 7u, 0u, 64u}) {
    Widths own, other;
    std::vector<float> own_scores;
    for (std::size_t i = 0; i < slots; ++i) {
      own.push_back(static_cast<std::uint8_t>(random() % 9));
      other.push_back(static_cast<std::uint8_t>(random() % 9));
      own_scores.push_back(
          static_cast<float>(random() % 1000));  // whole numbers: sums of s 4^-b are exact in any order
    }
    merged.merge(distance(own, other, own_scores));
    bits.insert(bits.end(), own.begin(), own.end());
    reference.insert(reference.end(), other.begin(), other.end());
    scores.insert(scores.end(), own_scores.begin(), own_scores.end());
  }
  const AllocationDistance whole = distance(bits, reference, scores);
  CHECK(merged.slots == 72);
  CHECK(merged.hamming() == whole.hamming());
  CHECK(merged.high_bit_jaccard() == whole.high_bit_jaccard());
  CHECK(merged.regret() == whole.regret());
}
