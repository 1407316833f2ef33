#include <kvq/runtime/prepare.h>

#include <kvq/codec/codec.h>
#include <kvq/core/dtype.h>
#include <kvq/runtime/kernels/decode/rotation_layout.h>
#include <kvq/runtime/kernels/dequantize/linear_layout.h>
#include <kvq/runtime/kernels/quantize_write/dense_layout.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

using namespace kvq;

namespace {

std::vector<float> random_numbers(std::size_t count, unsigned seed, float size = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, size);
  std::vector<float> all(count);
  for (float& x : all) x = normal(random);
  return all;
}

float split_half_of(const std::vector<std::byte>& packed, int offset, bool bf16) {
  std::uint16_t bits;
  std::memcpy(&bits, packed.data() + offset, sizeof bits);
  return bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

}  // namespace

TEST_CASE("A packed rotation multiplies what a lane loads into what it stores", "[runtime]") {
  const int dim = GENERATE(32, 64, 96, 128, 192, 256);
  const bool bf16 = GENERATE(true, false);
  CAPTURE(dim, bf16);
  const auto d = static_cast<std::size_t>(dim);
  const std::vector<float> matrix = random_numbers(d * d, 1, 1.0f / std::sqrt(static_cast<float>(dim)));
  const std::vector<float> x = random_numbers(d, 2);
  const RotationLayout layout{dim};
  REQUIRE(packed_rotation_bytes(dim) == 4 * dim * dim);
  std::vector<std::byte> packed(static_cast<std::size_t>(packed_rotation_bytes(dim)));
  REQUIRE(pack_rotations(matrix, dim, bf16, packed).ok());

  // Of each 32 channels, lane t loads eight from 8 t on, as the words x, y, z, w of two. Slab 2 j + half takes the
  // words x, y or z, w as k = 2 t, 2 t + 1 and 2 t + 8, 2 t + 9. Of the columns 8 n .. 8 n + 7, lane t gets 2 t and 2 t
  // + 1, which are elements 2 (n mod 4) and 2 (n mod 4) + 1 of the lane's eight channels of step n div 4.
  std::vector<float> found(d);
  for (int t = 0; t < 4; ++t)
    for (int n = 0; n < dim / 8; ++n)
      for (int i = 0; i < 2; ++i) {
        double sum = 0.0;
        for (int slab = 0; slab < layout.slabs(); ++slab)
          for (int k = 0; k < 16; ++k) {
            const int lane = k % 8 / 2, word = 2 * (slab % 2) + k / 8;
            const float loaded = x[static_cast<std::size_t>(32 * (slab / 2) + 8 * lane + 2 * word + k % 2)];
            for (int split_half = 0; split_half < 2; ++split_half)
              sum +=
                  double{loaded} * split_half_of(packed, layout.offset(slab, split_half, k, 8 * n + 2 * t + i), bf16);
          }
        found[static_cast<std::size_t>(32 * (n / 4) + 8 * t + n % 4 * 2 + i)] = static_cast<float>(sum);
      }
  for (std::size_t channel = 0; channel < d; ++channel) {
    double expected = 0.0;
    for (std::size_t row = 0; row < d; ++row) expected += double{x[row]} * matrix[row * d + channel];
    CHECK(found[channel] == Approx(expected).margin(2e-4));
  }
}

TEST_CASE("A packed rotation uses every byte once", "[runtime]") {
  const int dim = GENERATE(64, 96, 256);
  const RotationLayout layout{dim};
  std::vector<int> used(static_cast<std::size_t>(layout.bytes()) / 2);
  for (int slab = 0; slab < layout.slabs(); ++slab)
    for (int split_half = 0; split_half < 2; ++split_half)
      for (int k = 0; k < 16; ++k)
        for (int n = 0; n < dim; ++n) ++used[static_cast<std::size_t>(layout.offset(slab, split_half, k, n) / 2)];
  CHECK(std::all_of(used.begin(), used.end(), [](int times) { return times == 1; }));
}

TEST_CASE("Rotations for decode lie as lanes take them, in two split halves", "[runtime]") {
  const int dim = GENERATE(32, 96, 128, 256);
  CAPTURE(dim);
  const auto d = static_cast<std::size_t>(dim);
  const std::vector<float> matrices = random_numbers(2 * d * d, 4);
  const std::vector<std::byte> all = rotation_fragments(matrices, dim);
  REQUIRE(all.size() == 2 * 4 * d * d);

  // In the order of the bytes: matrices, tiles of 16 columns, steps of 16 rows, high and low split half, lanes 4 g + t,
  // two pairs of the four rows from 4 t on, the columns 2 g and 2 g + 1, a pair's rows.
  std::size_t at = 0, wrong = 0;
  const auto next = [&](int split_half, float element) {
    const float high = bf16_to_float(float_to_bf16(element));
    const float expected = split_half == 0 ? high : bf16_to_float(float_to_bf16(element - high));
    wrong += split_half_of(all, static_cast<int>(at), true) != expected;
    at += 2;
  };
  for (std::size_t m = 0; m < 2; ++m)
    for (std::size_t tile = 0; tile < d / 16; ++tile)
      for (std::size_t step = 0; step < d / 16; ++step)
        for (int split_half = 0; split_half < 2; ++split_half)
          for (std::size_t lane = 0; lane < 32; ++lane)
            for (std::size_t word = 0; word < 4; ++word)
              for (std::size_t half = 0; half < 2; ++half) {
                const std::size_t row = 16 * step + lane % 4 * 4 + word / 2 * 2 + half,
                                  column = 16 * tile + lane / 4 * 2 + word % 2;
                next(split_half, matrices[(m * d + row) * d + column]);
              }
  CHECK(at == all.size());
  CHECK(wrong == 0);
  CHECK(rotation_fragments(std::span(matrices).first(400), 20).empty());
}

TEST_CASE("Taps of linear rows are the elements of Theta that are not 0", "[runtime]") {
  constexpr std::size_t kDim = 64, kHeads = 2;
  const std::size_t bits = GENERATE(128u, 160u, 96u);  // whole blocks of places, or places of no bit
  const auto places = static_cast<std::size_t>(value_places(static_cast<int>(bits) / 32));
  std::vector<int> used(places);
  for (std::size_t place = 0; place < places; ++place)
    ++used[static_cast<std::size_t>(value_bit_of_place(static_cast<int>(place)))];
  CHECK(used == std::vector<int>(places, 1));
  CHECK(value_bit_of_place(16 * 3 + 5) == 5 * 8 + 3);
  CHECK(value_bit_of_place(128 + 16 * 3 + 5) == (16 + 5) * 8 + 3);

  // Another number of elements in each row and column, none in some.
  std::vector<float> bases = random_numbers(kHeads * kDim * bits, 7);
  for (std::size_t i = 0; i < bases.size(); ++i)
    if ((i * 7919) % 13 > 1 || i % bits == 5 || i / bits % kDim == 9) bases[i] = 0.0f;
  for (const bool value : {false, true}) {
    const HostTaps taps = linear_taps(bases, kDim, static_cast<int>(bits), value);
    const std::size_t outputs = value ? kDim : bits, count = static_cast<std::size_t>(taps.count);
    REQUIRE(taps.weights.size() == kHeads * count * outputs);
    REQUIRE(taps.sources.size() == taps.weights.size());
    std::vector<float> found(bases.size());
    for (std::size_t h = 0; h < kHeads; ++h)
      for (std::size_t i = 0; i < count; ++i)
        for (std::size_t output = 0; output < outputs; ++output) {
          const std::size_t at = (h * count + i) * outputs + output, source = taps.sources[at];
          REQUIRE(source < (value ? places : kDim));
          if (taps.weights[at] == 0.0f) continue;
          const std::size_t channel = value ? output : source,
                            bit =
                                value ? static_cast<std::size_t>(value_bit_of_place(static_cast<int>(source))) : output;
          REQUIRE(bit < bits);
          found[(h * kDim + channel) * bits + bit] += taps.weights[at];
        }
    CHECK(found == bases);
  }
  const HostTaps none = linear_taps(std::vector<float>(kDim * bits), kDim, static_cast<int>(bits), true);
  CHECK(none.count == 1);
  CHECK(none.weights == std::vector<float>(kDim));
}

TEST_CASE("Rotations that cannot be packed are refused by name", "[runtime]") {
  using Catch::Contains;
  std::vector<std::byte> out(4 * 64 * 64);
  const std::vector<float> matrix(64 * 64);
  CHECK(pack_rotations(matrix, 64, true, out).ok());
  CHECK_THAT(pack_rotations(matrix, 80, true, out).message(), Contains("head_dim 80; supported are multiples of 32"));
  CHECK_THAT(pack_rotations(std::span(matrix).first(100), 64, true, out).message(), Contains("100 elements"));
  CHECK_THAT(pack_rotations(matrix, 64, true, std::span(out).first(64)).message(),
             Contains("into 64 bytes, expected matrices of 64 x 64, 16384 bytes each"));
}

TEST_CASE("A clip's rank is the codec's threshold", "[runtime]") {
  const int dim = GENERATE(64, 96, 128);
  const double ratio = GENERATE(0.0001, 0.5, 0.85, 0.9, 0.96, 0.99, 0.9999);
  CAPTURE(dim, ratio);
  std::vector<float> row = random_numbers(static_cast<std::size_t>(dim), 3);
  const float threshold = clip_threshold(row, ratio);
  const int rank = clip_rank(ratio, dim);
  REQUIRE(rank >= 1);
  for (float& x : row) x = std::abs(x);
  std::sort(row.begin(), row.end(), std::greater<>{});
  CHECK(row[static_cast<std::size_t>(rank - 1)] == threshold);
  CHECK(clip_rank(1.0, dim) == 0);
}

TEST_CASE("Clip ranks and centers are of every head, whatever the rotation's scope", "[runtime]") {
  TensorPlan plan;
  CHECK(clip_ranks(plan, 2, 64).empty());
  CHECK(rotated_center(plan, 2, 64).empty());
  plan.clip_ratio = {1.0, 1.0};
  CHECK(clip_ranks(plan, 2, 64).empty());
  plan.clip_ratio = {1.0, 0.9};
  CHECK(clip_ranks(plan, 2, 64) == std::vector<std::int32_t>{0, 7});

  plan.rotation = {.kind = RotationKind::dense, .scope = Scope::layer, .matrix = random_numbers(64 * 64, 4)};
  plan.clip_ratio = {0.9};
  plan.center = random_numbers(64, 5);
  CHECK(clip_ranks(plan, 2, 64) == std::vector<std::int32_t>{7, 7});
  const std::vector<float> rotated = rotated_center(plan, 2, 64);
  REQUIRE(rotated.size() == 128);
  for (std::size_t j = 0; j < 64; ++j) {
    double expected = 0.0;
    for (std::size_t i = 0; i < 64; ++i) expected += double{plan.center[i]} * plan.rotation.matrix[i * 64 + j];
    CHECK(rotated[j] == static_cast<float>(expected));
    CHECK(rotated[64 + j] == rotated[j]);
  }
}

TEST_CASE("Matrices for the dequantization of linear rows have each bit and channel once", "[runtime]") {
  for (const bool value : {false, true})
    for (int words = 1; words <= 16; ++words) {
      const LinearRowsLayout layout{64, words};
      std::vector<int> bits(static_cast<std::size_t>(32 * words)), channels(64),
          elements(static_cast<std::size_t>(layout.bytes()) / 2);
      for (int turn = 0; turn < layout.turns(); ++turn)
        for (int row = 0; row < 32; ++row) {
          const int step = row / 16, of_step = row % 16;
          if (turn < words)
            ++bits.at(static_cast<std::size_t>(layout.row_bit(value, turn, step, of_step)));
          else
            ++channels.at(static_cast<std::size_t>(layout.row_channel(turn - words, step, of_step)));
          for (int column = 0; column < 64; ++column)
            ++elements.at(static_cast<std::size_t>(layout.offset(turn, step, of_step, column)) / 2);
        }
      CAPTURE(value, words);
      CHECK(bits == std::vector<int>(bits.size(), 1));
      CHECK(channels == std::vector<int>(64, 1));
      CHECK(std::count(elements.begin(), elements.end(), 1) == layout.turns() * 32 * 64);
      CHECK(std::count(elements.begin(), elements.end(), 0) == 2 * 2 * 64);  // the factors
    }
}

TEST_CASE("Matrices for the dequantization of linear rows are products, rounded after their factors", "[runtime]") {
  constexpr std::size_t kDim = 128, kHeads = 2, kBits = 96;
  const std::vector<float> inverses = random_numbers(kHeads * kDim * kDim, 8),
                           bases = random_numbers(kHeads * kDim * kBits, 9);
  const bool value = GENERATE(false, true), rotated = GENERATE(false, true);
  const std::vector<std::byte> all = row_matrices(
      kHeads, rotated ? std::span<const float>(inverses) : std::span<const float>(), bases, kDim, kBits / 32, value);
  const LinearRowsLayout layout{kDim, kBits / 32};
  REQUIRE(all.size() == kHeads * static_cast<std::size_t>(layout.bytes()));
  const auto inverse = [&](std::size_t h, std::size_t i, std::size_t j) {
    return rotated ? static_cast<double>(inverses[(h * kDim + i) * kDim + j]) : i == j ? 1.0 : 0.0;
  };
  double wrong = 0.0;
  for (std::size_t h = 0; h < kHeads; ++h)
    for (int column = 0; column < static_cast<int>(kDim); ++column) {
      const std::byte* block = all.data() + h * static_cast<std::size_t>(layout.bytes()) +
                               static_cast<std::size_t>(column / 64 * layout.block_bytes());
      for (int turn = 0; turn < layout.turns(); ++turn)
        for (int row = 0; row < 32; ++row) {
          std::uint16_t element = 0;
          float factor = 0.0f;
          const int part = turn < layout.row_words ? 0 : 1;
          std::memcpy(&element, block + layout.offset(turn, row / 16, row % 16, column % 64), sizeof element);
          std::memcpy(&factor, block + layout.factor_offset(part, column % 64), sizeof factor);
          const auto to = static_cast<std::size_t>(column);
          double expected = 0.0;
          if (part == 1) {
            const int channel = layout.row_channel(turn - layout.row_words, row / 16, row % 16);
            expected = inverse(h, static_cast<std::size_t>(channel), to);
          } else {
            const auto bit = static_cast<std::size_t>(layout.row_bit(value, turn, row / 16, row % 16));
            for (std::size_t c = 0; c < kDim; ++c)
              expected += static_cast<double>(bases[(h * kDim + c) * kBits + bit]) * inverse(h, c, to);
          }
          wrong = std::max(
              wrong, std::abs(static_cast<double>(f16_to_float(element)) - expected / static_cast<double>(factor)));
        }
    }
  CHECK(wrong <= 0x1p-12);
}
