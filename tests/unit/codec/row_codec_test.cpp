#include <kvq/codec/codec.h>
#include <kvq/codec/row_codec.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/random_data.h"
#include "support/row_plans.h"
#include "support/row_reference.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

using namespace kvq;
using Catch::Matchers::StartsWith;

namespace {

constexpr ScaleType kTypes[] = {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32};

struct Coded {
  std::vector<std::uint8_t> codes;
  std::vector<float> numbers, decoded;
};
Coded coded(const RowCodec& codec, std::span<const float> row) {
  Coded result{std::vector<std::uint8_t>(row.size(), 255),
               std::vector<float>(static_cast<std::size_t>(codec.num_numbers())), std::vector<float>(row.size(), 7.0f)};
  codec.encode(row, result.codes, result.numbers);
  codec.decode(result.codes, result.numbers, result.decoded);
  return result;
}

/// A random number that the scale type represents.
float any_number(test::Random& random, ScaleType type) {
  return round_to(type, static_cast<float>(std::exp(3.0 * random.normal())));
}

/// Packs random codes and numbers, unpacks them and compares; padding must be zero.
void check_bytes(const TensorPlan& plan, int dim, test::Random& random) {
  const RowCodec codec(plan, 0, dim);
  const auto size = static_cast<std::size_t>(row_bytes(plan, dim));
  REQUIRE(static_cast<std::size_t>(codec.layout().row_bytes) <= size);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(dim)), codes_back(codes.size(), 255);
  for (std::size_t j = 0; j < codes.size(); ++j) {
    const int width = plan.allocation ? plan.allocation->channel_bits[j] : code_bits(plan.coder);
    codes[j] = static_cast<std::uint8_t>(random.integer(0, (1 << width) - 1));
  }
  std::vector<float> numbers(static_cast<std::size_t>(codec.num_numbers())), numbers_back(numbers.size());
  for (float& number : numbers) number = any_number(random, scale_type(plan.coder));
  const int centroid = plan.centroids ? random.integer(0, plan.centroids->count - 1) : 0;
  std::vector<std::byte> bytes(size, std::byte{0xa5}), again(size, std::byte{0x5a});
  codec.pack(codes, numbers, centroid, bytes);
  CHECK(codec.unpack(bytes, codes_back, numbers_back) == centroid);
  CHECK(codes_back == codes);
  CHECK(test::first_bit_difference(numbers_back, numbers) == "");
  codec.pack(codes, numbers, centroid, again);
  CHECK(again == bytes);  // pack() writes every byte, also padding
  if (size == 0) return;
  // If another head has a larger row, the rest of the row is zero.
  std::vector<std::byte> larger(size + 8, std::byte{0xff});
  codec.pack(codes, numbers, centroid, larger);
  CHECK(std::equal(bytes.begin(), bytes.end(), larger.begin()));
  CHECK(std::all_of(larger.begin() + static_cast<std::ptrdiff_t>(size), larger.end(),
                    [](std::byte b) { return b == std::byte{0}; }));
}

/// Compares codes, numbers, decoded row and bytes with those of the reference implementation of packing.md.
void check_against_reference(const TensorPlan& plan, int dim, std::span<const float> row) {
  const RowCodec codec(plan, 0, dim);
  const test::ReferenceBytes expected =
      test::reference_plan_row(plan, 0, plan.centroids ? plan.centroids->count - 1 : 0, row);
  const Coded found = coded(codec, row);
  CHECK(found.codes == expected.codes);
  CHECK(test::first_bit_difference(found.numbers, expected.numbers) == "");
  CHECK(test::first_bit_difference(found.decoded, expected.decoded) == "");
  std::vector<std::byte> bytes(static_cast<std::size_t>(row_bytes(plan, dim)), std::byte{0xff}),
      padded = expected.bytes;
  codec.pack(found.codes, found.numbers, plan.centroids ? plan.centroids->count - 1 : 0, bytes);
  if (plan.allocation) {
    while (padded.size() % 4 != 0) padded.push_back(std::byte{0});
  }
  CHECK(bytes == padded);
  std::vector<float> in_place(row.begin(), row.end());
  codec.quantize(in_place);
  CHECK(test::first_bit_difference(in_place, expected.decoded) == "");
}

}  // namespace

TEST_CASE("Codes and numbers survive their bytes at every width and length, for every coder", "[codec][row]") {
  test::Random random(1);
  for (int dim = 1; dim <= 130; ++dim)
    for (int bits = 1; bits <= 8; ++bits) {
      const ScaleType type = kTypes[random.integer(0, 2)];
      for (TensorPlan plan : test::plain_plans(bits, dim, type)) {
        INFO(coder_name(plan.coder) << ", " << bits << " bits, " << dim << " channels, " << to_string(type));
        check_bytes(plan, dim, random);
      }
    }
}

TEST_CASE("Groups within a row survive too, and lie where packing.md says", "[codec][row]") {
  test::Random random(2);
  for (const int group : {1, 2, 3, 8, 12, 32})
    for (const int groups : {1, 2, 3, 5})
      for (int bits = 1; bits <= 8; ++bits)
        for (TensorPlan plan : test::plain_plans(bits, group, ScaleType::fp16)) {
          const int dim = group * groups;
          INFO(coder_name(plan.coder) << ", " << bits << " bits, " << groups << " groups of " << group);
          check_bytes(plan, dim, random);
          CHECK(row_bytes(plan, dim) == (dim * bits + 7) / 8 + 2 * groups * numbers_per_group(plan.coder));
          const RowCodec codec(plan, 0, dim);
          CHECK(codec.num_numbers() == groups * numbers_per_group(plan.coder));
          CHECK(codec.layout().numbers_offset == (dim * bits + 7) / 8);
        }
}

TEST_CASE("Rows of one width in the new coders are coded as the text says, bit for bit", "[codec][row]") {
  test::Random random(3);
  for (const int group : {1, 2, 5, 7, 8, 9, 16, 31, 33, 64, 70})
    for (int bits = 1; bits <= 8; ++bits)
      for (const ScaleRule rule : {ScaleRule::rms, ScaleRule::norm, ScaleRule::least_squares}) {
        const ScaleType type = kTypes[random.integer(0, 2)];
        const int dim = group * random.integer(1, 2);
        const std::vector<float> row =
            test::gaussian(static_cast<std::size_t>(dim), random.bits(), std::exp(2.0 * random.normal()));
        INFO(bits << " bits, group " << group << ", dim " << dim << ", " << to_string(rule) << ", " << to_string(type));
        TensorPlan plan;
        plan.coder = test::codebook_coder(bits, group, rule, type, random.bits());
        check_against_reference(plan, dim, row);
        if (bits == 8 && group != 9) continue;  // 65536 branches for each channel take too long
        plan.coder = test::trellis_coder({bits}, group, rule, type, random.bits(), group <= 16 ? 6 : 3);
        check_against_reference(plan, dim, row);
      }
}

TEST_CASE("Mixed rows of any descending widths are coded and laid out as the text says", "[codec][row]") {
  test::Random random(4);
  for (int round = 0; round < 150; ++round) {
    const int dim = random.integer(1, 130);
    TensorPlan plan = test::mixed_plan(test::descending_widths(random, dim), dim, round % 3,
                                       kTypes[random.integer(0, 2)], random.bits());
    if (random.integer(0, 2) == 0) test::add_centroids(plan, dim, random.integer(0, 1) == 0 ? 5 : 300, random.bits());
    if (random.integer(0, 1) == 0) test::add_row_scale(plan, random.bits());
    INFO("round " << round << ", " << coder_name(plan.coder) << ", dim " << dim << ", "
                  << (plan.allocation->has_row_scale() ? "one scale" : "scales of segments"));
    check_against_reference(plan, dim, test::gaussian(static_cast<std::size_t>(dim), random.bits(), 2.0));
    check_bytes(plan, dim, random);
  }
}

TEST_CASE("Parts of a mixed row follow each other, aligned to what they hold", "[codec][row]") {
  test::Random random(5);
  for (int round = 0; round < 500; ++round) {
    const int dim = random.integer(1, 300), scale = random.integer(0, 1) == 0 ? 2 : 4, index = random.integer(0, 2);
    const std::vector<std::uint8_t> widths = test::descending_widths(random, dim);
    const RowLayout layout = mixed_row_layout(widths.data(), dim, scale, index);
    INFO("round " << round << ", dim " << dim);
    int channel = 0, offset = 0, last = 9;
    for (int i = 0; i < layout.num_segments; ++i) {
      const CodeSegment& segment = layout.segments[static_cast<std::size_t>(i)];
      CHECK(segment.bits < last);
      CHECK(segment.bits > 0);
      CHECK(segment.stored_bits == (segment.bits > 4 ? 8 : segment.bits));
      CHECK(segment.first_channel == channel);
      CHECK(segment.byte_offset == offset);
      CHECK(std::all_of(widths.begin() + channel, widths.begin() + channel + segment.channels,
                        [&](int width) { return width == segment.bits; }));
      channel += segment.channels;
      offset += (segment.channels * segment.stored_bits + 7) / 8;
      last = segment.bits;
    }
    CHECK(std::all_of(widths.begin() + channel, widths.end(), [](int width) { return width == 0; }));
    CHECK(layout.num_numbers == layout.num_segments);
    CHECK(layout.numbers_offset % scale == 0);
    CHECK(layout.numbers_offset >= offset);
    CHECK(layout.numbers_offset < offset + scale);
    const int end = layout.numbers_offset + scale * layout.num_numbers;
    CHECK(layout.index_bytes == index);
    if (index > 0) CHECK(layout.index_offset % index == 0);
    if (index > 0) CHECK(layout.index_offset - end < index);
    CHECK(layout.row_bytes == (index > 0 ? layout.index_offset + index : end));
    CHECK(common_row_bytes(layout.row_bytes) % 4 == 0);
    CHECK(common_row_bytes(layout.row_bytes) - layout.row_bytes < 4);
    CHECK(common_row_bytes(layout.row_bytes) >= layout.row_bytes);
  }
}

TEST_CASE("All heads have rows of the size that the largest needs, in words", "[codec][row][plan]") {
  TensorPlan plan;
  plan.coder = UniformCoder{.bits = 8, .group_size = 0, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
  plan.allocation = BitAllocation{
      .channel_bits = {8, 4, 4, 2, 2, 2, 1, 0, /**/ 8, 8, 8, 8, 8, 8, 8, 3},
      .channel_order = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7},
  };
  // Head 0: 1 + 1 + 1 + 1 bytes and 4 scales, 12 bytes. Head 1: 7 + 1 bytes and 2 scales, 12 bytes, a whole number of
  // words; with an index 13, padded to 16.
  CHECK(row_layout(plan, 0, 8).row_bytes == 12);
  CHECK(row_layout(plan, 1, 8).row_bytes == 12);
  CHECK(row_bytes(plan, 8) == 12);
  test::add_centroids(plan, 8, 3, 1, 2);
  CHECK(index_bytes(plan) == 1);
  CHECK(row_layout(plan, 1, 8).row_bytes == 13);
  CHECK(row_bytes(plan, 8) == 16);
  plan.allocation->channel_bits = {0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0};
  CHECK(row_layout(plan, 0, 8).row_bytes == 1);
  CHECK(row_bytes(plan, 8) == 8);  // head 1: one byte, padding, a scale, the index: 5 bytes, padded to 8
  CHECK(index_bytes(TensorPlan{}) == 0);
}

TEST_CASE("Indices of at most 256 centroids take a byte, of more two", "[codec][row]") {
  for (const int dim : {1, 7, 8})
    for (const int count : {2, 256, 257, 4096}) {
      TensorPlan plan;
      plan.coder =
          UniformCoder{.bits = 3, .group_size = dim, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
      test::add_centroids(plan, dim, count, 3);
      CHECK(index_bytes(plan) == (count > 256 ? 2 : 1));
      CHECK(row_bytes(plan, dim) == (3 * dim + 7) / 8 + 2 + index_bytes(plan));  // rows of one width have no padding
      const RowCodec codec(plan, 0, dim);
      std::vector<std::uint8_t> codes(static_cast<std::size_t>(dim), 1);
      std::vector<float> numbers = {0.5f};
      for (const int index : {0, 1, count - 1, std::min(count - 1, 255)}) {
        std::vector<std::byte> bytes(static_cast<std::size_t>(row_bytes(plan, dim)));
        codec.pack(codes, numbers, index, bytes);
        CHECK(codec.unpack(bytes, codes, numbers) == index);
        const std::size_t at = bytes.size() - static_cast<std::size_t>(index_bytes(plan));
        CHECK(bytes[at] == static_cast<std::byte>(index & 255));
        if (count > 256) CHECK(bytes[at + 1] == static_cast<std::byte>(index >> 8));
      }
    }
}

TEST_CASE("Bits above the width of a byte of 5 to 7 bits are ignored", "[codec][row]") {
  for (int width = 5; width <= 7; ++width) {
    TensorPlan plan = test::mixed_plan(
        {static_cast<std::uint8_t>(width), static_cast<std::uint8_t>(width), static_cast<std::uint8_t>(width), 4, 4}, 5,
        0, ScaleType::fp16, 1);
    const RowCodec codec(plan, 0, 5);
    std::vector<std::uint8_t> codes = {0, static_cast<std::uint8_t>((1 << width) - 1), 5, 15, 3}, back(5);
    std::vector<float> numbers = {1.0f, 2.0f};
    std::vector<std::byte> bytes(static_cast<std::size_t>(row_bytes(plan, 5)));
    codec.pack(codes, numbers, 0, bytes);
    for (std::size_t i = 0; i < 3; ++i) bytes[i] |= static_cast<std::byte>(0xff << width);
    codec.unpack(bytes, back, numbers);
    CHECK(back == codes);
  }
}

TEST_CASE("Channels without bits decode to +0 whatever the row holds", "[codec][row]") {
  for (int coder = 0; coder < 3; ++coder) {
    const TensorPlan plan = test::mixed_plan({4, 4, 2, 0, 0, 0}, 6, coder, ScaleType::fp16, 2);
    const RowCodec codec(plan, 0, 6);
    const Coded found = coded(codec, std::vector<float>{1, -2, 3, -4, 5e30f, -6});
    for (std::size_t j = 3; j < 6; ++j) {
      CHECK(found.codes[j] == 0);
      CHECK(std::bit_cast<std::uint32_t>(found.decoded[j]) == 0);
    }
    std::vector<float> row = {1, -2, 3, -0.0f, -5, 6};
    codec.quantize(row);
    for (std::size_t j = 3; j < 6; ++j) CHECK(std::bit_cast<std::uint32_t>(row[j]) == 0);
    const TensorPlan nothing = test::mixed_plan({0, 0, 0}, 3, coder, ScaleType::fp16, 2);
    CHECK(row_bytes(nothing, 3) == 0);
    std::vector<float> gone = {1, 2, 3};
    RowCodec(nothing, 0, 3).quantize(gone);
    CHECK(gone == std::vector<float>{0, 0, 0});
  }
}

TEST_CASE("A mixed row of one width is the row of that width", "[codec][row]") {
  for (const int bits : {1, 2, 3, 4, 8})
    for (int coder = 0; coder < 3; ++coder) {
      const TensorPlan mixed = test::mixed_plan(std::vector<std::uint8_t>(16, static_cast<std::uint8_t>(bits)), 16,
                                                coder, ScaleType::bf16, 3);
      TensorPlan plain = mixed;
      plain.allocation.reset();
      std::visit(
          [](auto& alternative) {
            if constexpr (requires { alternative.group_size; }) alternative.group_size = 16;
          },
          plain.coder);
      const std::vector<float> row = test::gaussian(16, 4);
      const Coded a = coded(RowCodec(mixed, 0, 16), row), b = coded(RowCodec(plain, 0, 16), row);
      INFO(coder_name(plain.coder) << " " << bits);
      CHECK(a.codes == b.codes);
      CHECK(test::first_bit_difference(a.numbers, b.numbers) == "");
      CHECK(test::first_bit_difference(a.decoded, b.decoded) == "");
      CHECK(row_bytes(mixed, 16) == (row_bytes(plain, 16) + 3) / 4 * 4);
    }
}

TEST_CASE("Each head has its own widths and tables", "[codec][row]") {
  TensorPlan plan;
  CodebookCoder coder{
      .bits = 2,
      .group_size = 0,
      .rule = ScaleRule::rms,
      .scale_type = ScaleType::fp32,
      .per_head = true,
  };
  coder.tables[2] = {-2, -1, 1, 2, -4, -0.5f, 0.5f, 4};
  coder.tables[1] = {-1, 1, -3, 3};
  plan.coder = coder;
  plan.allocation = BitAllocation{.channel_bits = {2, 2, 1, 0, 2, 1, 1, 1}, .channel_order = {0, 1, 2, 3, 0, 1, 2, 3}};
  // The first group of head 0 is {3, -1} with d = sqrt 5, the second {-7}.
  std::vector<float> row = {3, -1, -7, 9};
  RowCodec(plan, 0, 4).quantize(row);
  const float d = std::sqrt(5.0f);
  CHECK(row == std::vector<float>{d, -d, -7, 0});
  row = {2, 3, -3, 3};
  RowCodec(plan, 1, 4).quantize(row);
  CHECK(row == std::vector<float>{1, 9, -9, 9});  // 2/2 = 1 is nearest to 0.5; 3 * (-3, 3)
}

TEST_CASE("Coding in place is coding and decoding, and an exact row stays what it became", "[codec][row]") {
  test::Random random(6);
  for (int bits = 1; bits <= 8; ++bits)
    for (const TensorPlan& plan : test::plain_plans(bits, 24, ScaleType::fp16)) {
      const std::vector<float> row = test::gaussian(24, random.bits());
      std::vector<float> in_place = row, plain = row;
      const RowCodec codec(plan, 0, 24), alone(plan.coder, plan.clip_ratio.empty() ? 1.0 : plan.clip_ratio[0], 24);
      codec.quantize(in_place);
      CHECK(test::first_bit_difference(in_place, coded(codec, row).decoded) == "");
      alone.quantize(plain);
      CHECK(test::first_bit_difference(plain, in_place) == "");
      plain = row;
      quantize_row(plan.coder, plan.clip_ratio.empty() ? 1.0 : plan.clip_ratio[0], plain);
      CHECK(test::first_bit_difference(plain, in_place) == "");
    }
  std::vector<float> row = test::gaussian(9, 1), once;
  const RowCodec exact(TensorPlan{}, 0, 9);
  exact.quantize(row);
  once = row;
  exact.quantize(row);
  CHECK(test::first_bit_difference(row, once) == "");
  quantize_exact(once);
  CHECK(test::first_bit_difference(row, once) == "");
}

TEST_CASE("Rows of zeros have scale 0 and the middle codes, and decode to zeros", "[codec][row]") {
  for (int bits = 1; bits <= 8; ++bits)
    for (const ScaleRule rule : {ScaleRule::rms, ScaleRule::norm, ScaleRule::least_squares}) {
      for (const Coder& coder : {Coder{test::codebook_coder(bits, 16, rule, ScaleType::fp16, 1)},
                                 Coder{test::trellis_coder({bits}, 16, rule, ScaleType::fp16, 1)}})
        for (const float zero :
             {0.0f, -0.0f, 1e-30f, 1e-9f}) {  // energy 0, and a root mean square below the scale type
          const Coded found = coded(RowCodec(coder, 1.0, 16), std::vector<float>(16, zero));
          INFO(coder_name(coder) << ", " << bits << " bits, " << zero);
          CHECK(found.codes == std::vector<std::uint8_t>(16, static_cast<std::uint8_t>(1 << (bits - 1))));
          CHECK(found.numbers == std::vector<float>{0.0f});
          CHECK(std::all_of(found.decoded.begin(), found.decoded.end(), [](float x) { return x == 0.0f; }));
        }
    }
}

TEST_CASE("A value on a threshold takes the upper entry", "[codec][row]") {
  const CodebookGroup group(std::vector<float>{-3, -1, 1, 3}, ScaleRule::rms, ScaleType::fp32);
  // Root mean square 2: thresholds at -4, 0, 4.
  std::vector<std::uint8_t> codes(6);
  const std::vector<float> x = {0.0f, -0.0f, std::sqrt(8.0f), -std::sqrt(8.0f), 2.0f, -2.0f};
  const float d = group.encode(x, codes);
  CHECK(d == Approx(2.0).epsilon(1e-6));
  CHECK(codes == std::vector<std::uint8_t>{2, 2, 2, 1, 2, 1});
  const std::vector<float> edge = {2, -2, 0, 0, 0, 0, 0, 0};  // root mean square 1, so 2 and -2 are on the thresholds
  codes.resize(8);
  CHECK(group.encode(edge, codes) == 1.0f);
  CHECK(codes == std::vector<std::uint8_t>{3, 1, 2, 2, 2, 2, 2, 2});
}

TEST_CASE("A table whose codes have no energy stores d", "[codec][row]") {
  // Entries 0 and 100: all values take code 0, N = 0.
  for (const ScaleRule rule : {ScaleRule::rms, ScaleRule::norm, ScaleRule::least_squares}) {
    const CodebookGroup group(std::vector<float>{0, 100}, rule, ScaleType::fp32);
    std::vector<std::uint8_t> codes(4);
    CHECK(group.encode(std::vector<float>{1, -1, 1, 1}, codes) == 1.0f);
    CHECK(codes == std::vector<std::uint8_t>{0, 0, 0, 0});
  }
}

TEST_CASE("One channel of NaN or infinity poisons the row in every coder, also one of width 0", "[codec][row]") {
  test::Random random(9);
  for (int round = 0; round < 20; ++round)
    for (const ScaleType type : kTypes)
      for (const bool centroids : {false, true}) {
        const int dim = 16 * random.integer(1, 3);
        std::vector<float> row = test::gaussian(static_cast<std::size_t>(dim), random.bits());
        test::spoil(row, random);
        std::vector<TensorPlan> plans = test::plain_plans(random.integer(1, 8), 16, type);
        plans.erase(plans.begin(), plans.begin() + 2);  // affine codes have a reference of their own
        for (int coder = 0; coder < 3; ++coder)
          plans.push_back(test::mixed_plan(test::descending_widths(random, dim), dim, coder, type, random.bits()));
        for (TensorPlan& plan : plans) {
          if (centroids) test::add_centroids(plan, dim, random.integer(0, 1) ? 300 : 5, random.bits());
          if (plan.allocation && random.integer(0, 1) == 0) test::add_row_scale(plan, random.bits());
          INFO(coder_name(plan.coder) << (plan.allocation ? ", mixed, " : ", ") << dim << " channels, round " << round);
          check_against_reference(plan, dim, row);
        }
      }
}

TEST_CASE("A poisoned row has codes 0, NaN numbers and index 0, and decodes to NaN everywhere", "[codec][row]") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (int coder = 0; coder < 3; ++coder)
    for (const std::size_t at : {0u, 15u}) {  // the last one has width 0
      std::vector<float> row = test::gaussian(16, 1);
      row[at] = -kInfinity;
      TensorPlan plan =
          test::mixed_plan({8, 6, 4, 4, 4, 4, 4, 4, 4, 4, 3, 2, 1, 1, 0, 0}, 16, coder, ScaleType::fp16, 1);
      test::add_centroids(plan, 16, 5, 2);
      const RowCodec codec(plan, 0, 16);
      const Coded found = coded(codec, row);
      CHECK(found.codes == std::vector<std::uint8_t>(16, 0));
      for (const float number : found.numbers) CHECK(std::bit_cast<std::uint32_t>(number) == 0x7fc00000u);
      for (const float x : found.decoded) CHECK(std::isnan(x));
      std::vector<std::byte> bytes(static_cast<std::size_t>(row_bytes(plan, 16)));
      codec.pack(found.codes, found.numbers, 3, bytes);
      std::vector<std::uint8_t> codes(16, 255);
      std::vector<float> numbers(found.numbers.size());
      CHECK(codec.unpack(bytes, codes, numbers) == 0);
      CHECK(codes == found.codes);
      CHECK(test::first_bit_difference(numbers, found.numbers) == "");
      codec.quantize(row);
      CHECK(test::first_bit_difference(row, found.decoded) == "");
      const TensorPlan nothing = test::mixed_plan({0, 0, 0}, 3, coder, ScaleType::fp16, 2);
      std::vector<float> gone = {1, kInfinity, 3};
      RowCodec(nothing, 0, 3).quantize(gone);
      CHECK(gone == std::vector<float>{0, 0, 0});
    }
}
