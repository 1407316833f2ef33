#include "coded_write_case.h"
#include "write_case.h"

#include <kvq/solve/trellis_tables.h>

#include <catch2/catch.hpp>

#include <cstddef>
#include <random>
#include <vector>

/// Writing of trellis codes that are searched in pairs of rows (pair_rows.h), byte for byte as RowCodec stores them.
using namespace kvq;
using namespace kvq::test;
using namespace kvq::test::coded;

namespace {

/// Two-bit codes of the trellises that kvq ships.
TensorPlan pair_trellis(int memory, ScaleRule rule) {
  return trellis(trellis_taps(2, memory, 128), 2, 128, rule, ScaleType::fp16);
}

/// Rows with many channels beyond the range of y, side by side, in patterns that spread the costs of states.
void make_hard(Rows& rows, bool bf16, unsigned seed) {
  std::mt19937 random(seed);
  for (auto* all : {&rows.k, &rows.v})
    for (std::size_t r = 0; r < all->size() / 128; r += 2) {
      const std::size_t first = random() % 128, count = 2 + random() % 8, pattern = random();
      for (std::size_t i = 0; i < count; ++i)
        (*all)[r * 128 + (first + i) % 128] = to_16_bits(pattern >> i & 1 ? 40.0f : -40.0f, bf16);
    }
}

}  // namespace

TEST_CASE("Trellis codes that are searched in pairs of rows", "[runtime][gpu][emulated][pairs]") {
  const int memory = GENERATE(1, 2, 3);
  const bool bf16 = GENERATE(true, false);
  const TensorPlan plain = pair_trellis(memory, bf16 ? ScaleRule::norm : ScaleRule::rms);
  CAPTURE(memory, bf16);
  const auto check = [&](const TensorPlan& k, const TensorPlan& v, Target t, int round_tokens, bool integers) {
    const LayerPlan layer = layer_of(k, 128, v, 128);
    Rows rows = random_rows(layer, static_cast<int>(t.slots.size()), bf16, 37, integers);
    if (!integers) make_hard(rows, bf16, 38);
    t.chosen = "quantize_write_coded", t.round_tokens = round_tokens;
    check_write_of(layer, t, rows, bf16);
  };
  check(plain, plain, target_of(171, 32, 7), 171, false);
  check(plain, plain, target_of(171, 16, 16), 64, false);  // three rounds, whole tiles
  Target single = target_of(3, 16, 0);
  single.slots = {31, -1, 6}, single.pages = 3;
  check(plain, plain, single, 3, false);
  // Maps that are exact for small integers, in both kernels for rotations, beside windows.
  const TensorPlan blocks = rotated(plain, 128), dense = permuted(plain, 128);
  Target windows = target_of(24, 32, 0);
  for (int i = 0; i < 24; ++i) windows.window_rows.push_back(i % 3 ? i + 8 : -1);
  check(dense, blocks, windows, 24, true);
  // One scale a row, with a gain for each head.
  const std::vector<std::vector<int>> all_of_two_bits(kHeads, {0, 0, 0, 0, 0, 0, 128, 128});
  TensorPlan gains = plain;
  std::get<TrellisCoder>(gains.coder).group_size = 0;
  gains = mixed(gains, 128, all_of_two_bits, true);
  check(gains, gains, target_of(70, 32, 0), 70, false);
  // Beside a side of other codes.
  check(plain, codebooks(3, 128, false, ScaleRule::norm, ScaleType::fp16), target_of(21, 32, 5), 21, false);
  check(pair_trellis(memory % 3 + 1, ScaleRule::norm), plain, target_of(21, 32, 5), 21, false);
}

TEST_CASE("Trellis codes are the same without a workspace", "[runtime][gpu][emulated][pairs]") {
  const TensorPlan plan = pair_trellis(2, ScaleRule::norm);
  const LayerPlan layer = layer_of(plan, 128, plan, 128);
  Target t = target_of(21, 32, 5);
  t.chosen = "quantize_write_coded";
  check_write_of(layer, t, random_rows(layer, 21, true, 39), true);
}

TEST_CASE("Pairs of rows in small", "[runtime][gpu][sanitizer][pairs]") {
  const TensorPlan plan = pair_trellis(3, ScaleRule::norm);
  const LayerPlan layer = layer_of(rotated(plan, 128), 128, permuted(plan, 128), 128);
  Target t = target_of(37, 16, 3);
  t.chosen = "quantize_write_coded", t.round_tokens = 20, t.slots[7] = -1;
  check_write_of(layer, t, random_rows(layer, 37, true, 40, true), true);
}
