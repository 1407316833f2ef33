#include <kvq/codec/codec.h>
#include <kvq/codec/page_codec.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/dtype.h>
#include <kvq/plan/layer_pages.h>

#include "support/compare.h"
#include "support/container_edit.h"
#include "support/error_of.h"
#include "support/page_vectors.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>
#include <string>

using namespace kvq;
using Catch::Matchers::StartsWith;

namespace {

// Written vectors

/// The first byte that differs, as "byte 7: 3 instead of 4"; empty if all bytes are equal.
std::string first_difference(const std::vector<std::byte>& found, const std::vector<std::byte>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (found[i] != expected[i])
      return "byte " + std::to_string(i) + ": " + std::to_string(std::to_integer<int>(found[i])) + " instead of " +
             std::to_string(std::to_integer<int>(expected[i]));
  return "";
}

std::vector<float> floats(const std::vector<std::uint16_t>& bits) {
  std::vector<float> values(bits.size());
  std::transform(bits.begin(), bits.end(), values.begin(), bf16_to_float);
  return values;
}

void check_page(const test::PageVector& vector) {
  const PageLayout& layout = vector.pages;
  REQUIRE(static_cast<std::size_t>(layout.page_bytes()) == vector.bytes.size());
  std::vector<std::byte> page(vector.bytes.size(), std::byte{0});
  for (const test::PageVector::Row& row : vector.rows) {
    if (!row.exact.empty()) {
      const std::vector<float> values = floats(row.exact);
      store_page_row(layout, row.side, row.head, row.place, values, page);
      std::vector<float> back(values.size());
      load_page_row(layout, row.side, row.head, row.place, vector.bytes, back);
      CHECK(test::first_bit_difference(back, values) == "");
      continue;
    }
    const ScaleType type = scale_type(vector.side(row.side).coder);
    store_page_row(layout, row.side, type, row.head, row.place, row.codes, row.numbers, page);
    std::vector<std::uint8_t> codes_back(row.codes.size(), 255);
    std::vector<float> numbers_back(row.numbers.size());
    load_page_row(layout, row.side, type, row.head, row.place, vector.bytes, codes_back, numbers_back);
    CHECK(codes_back == row.codes);
    CHECK(test::first_bit_difference(numbers_back, row.numbers) == "");
  }
  CHECK(first_difference(page, vector.bytes) == "");
}

void check_windows(const test::PageVector& vector) {
  const WindowLayout& layout = vector.windows;
  REQUIRE(static_cast<std::size_t>(layout.slot_bytes()) == vector.bytes.size());
  std::vector<std::byte> slot(vector.bytes.size(), std::byte{0});
  for (const test::PageVector::Row& row : vector.rows) {
    const std::vector<float> values = floats(row.exact);
    const int window_row = layout.row(row.place);
    store_window_row(layout, row.side, row.head, window_row, values, slot);
    std::vector<float> back(values.size());
    load_window_row(layout, row.side, row.head, window_row, vector.bytes, back);
    CHECK(test::first_bit_difference(back, values) == "");
  }
  CHECK(first_difference(slot, vector.bytes) == "");
}

// Made-up plans

struct Format {
  int dim, bits, group;
  UniformLevels levels;
  ScaleType type;
  ZeroKind zero = ZeroKind::floating;
};

std::vector<Format> formats() {
  std::vector<Format> all;
  for (const int bits : {2, 3, 4})
    for (const int dim : {32, 64, 96, 128, 192, 256})
      for (const int group : {32, 64, 96, 128, 256})
        if (dim * bits % 128 == 0 && dim % group == 0)
          for (const auto type : {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32}) {
            all.push_back({dim, bits, group, UniformLevels::affine, type});
            all.push_back({dim, bits, group, UniformLevels::symmetric, type});
            if (dim == 128) all.push_back({dim, bits, group, UniformLevels::affine, type, ZeroKind::integer});
          }
  return all;
}

TensorPlan tensor_plan(const Format& format) {
  const bool affine = format.levels == UniformLevels::affine;
  TensorPlan plan;
  plan.coder = UniformCoder{
      .bits = format.bits,
      .group_size = format.group,
      .levels = format.levels,
      .rule = affine ? ScaleRule::minmax : ScaleRule::norm,
      .scale_type = format.type,
      .zero = format.zero,
  };
  if (affine) plan.clip_ratio = {1.0, 1.0};
  return plan;
}

/// Keys and values of one format.
LayerPlan layer_plan(const Format& format) {
  return {
      .layer = 0,
      .geometry =
          {
              .num_q_heads = 2,
              .num_kv_heads = 2,
              .head_dim = format.dim,
              .v_head_dim = format.dim,
              .softmax_scale = 1.0,
          },
      .k = tensor_plan(format),
      .v = tensor_plan(format),
  };
}

std::string name(const Format& f) {
  return std::to_string(f.dim) + " x " + std::to_string(f.bits) + " bits, group " + std::to_string(f.group) + " " +
         to_string(f.levels) + " " + to_string(f.type) + " " + to_string(f.zero);
}

std::vector<std::byte> random_bytes(std::int64_t count, std::uint64_t seed) {
  test::Random random(seed);
  std::vector<std::byte> bytes(static_cast<std::size_t>(count));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.bits() & 0xffu);
  return bytes;
}

/// Number of bits that differ.
int changed_bits(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  int count = 0;
  for (std::size_t i = 0; i < a.size(); ++i) count += std::popcount(std::to_integer<unsigned>(a[i] ^ b[i]));
  return count;
}

std::vector<std::byte> inverted(std::vector<std::byte> bytes) {
  for (std::byte& byte : bytes) byte = ~byte;
  return bytes;
}

/// Checks that storing a row sets all of its `row_bits` bits, whatever the bits were before, and changes no other bit.
template <typename Store>
void check_own_bits(const std::vector<std::byte>& before, int row_bits, const Store& store) {
  const std::vector<std::byte> opposite = inverted(before);
  std::vector<std::byte> one = before, other = opposite;
  store(one);
  store(other);
  // A bit of the row is equal in both results; every other bit keeps its old value, which is inverted in the second
  // page.
  CHECK(changed_bits(one, other) == static_cast<int>(before.size()) * 8 - row_bits);
  CHECK(changed_bits(one, before) + changed_bits(other, opposite) == row_bits);
}

}  // namespace

TEST_CASE("Pages and windows have the written bytes, and written bytes give the rows", "[codec][golden]") {
  std::set<std::string> names;
  const std::string path = KVQ_SOURCE_DIR "/formats/page_vectors.json";
  for (const test::PageVector& vector : test::parse_page_vectors(test::file_bytes(path))) {
    INFO(vector.name << ": " << vector.why);
    names.insert(vector.name);
    vector.in_pages ? check_page(vector) : check_windows(vector);
  }
  CHECK(names.size() >= 20);
}

TEST_CASE("Coded rows survive a full page of every format", "[codec]") {
  for (const Format& format : formats())
    for (const int page_size : {16, 32, 64, 128}) {
      INFO(name(format) << ", page_size " << page_size);
      const LayerPlan plan = layer_plan(format);
      const PageLayout layout = page_layout_of(plan, page_size);
      const RowCodec codec(plan.k, 0, format.dim);
      std::vector<std::byte> page = random_bytes(layout.page_bytes(), 7);
      struct Stored {
        Side side;
        int head, slot;
        std::vector<std::uint8_t> codes;
        std::vector<float> numbers;
      };
      std::vector<Stored> rows;
      for (int head = 0; head < 2; ++head)
        for (const Side side : kSides)
          for (int slot = 0; slot < page_size; ++slot) {
            const auto seed = static_cast<std::uint64_t>(rows.size() + 1);
            Stored row{side, head, slot, std::vector<std::uint8_t>(static_cast<std::size_t>(format.dim)),
                       std::vector<float>(static_cast<std::size_t>(codec.num_numbers()))};
            codec.encode(test::gaussian(row.codes.size(), seed), row.codes, row.numbers);
            store_page_row(layout, side, format.type, head, slot, row.codes, row.numbers, page);
            rows.push_back(std::move(row));
          }
      bool equal = true;
      for (const Stored& row : rows) {
        std::vector<std::uint8_t> codes(row.codes.size(), 255);
        std::vector<float> numbers(row.numbers.size());
        load_page_row(layout, row.side, format.type, row.head, row.slot, page, codes, numbers);
        equal = equal && codes == row.codes && test::first_bit_difference(numbers, row.numbers) == "";
      }
      CHECK(equal);
    }
}

TEST_CASE("Storing a row sets its own bits and no other", "[codec]") {
  for (const Format& format : formats()) {
    INFO(name(format));
    const LayerPlan plan = layer_plan(format);
    const PageLayout layout = page_layout_of(plan, 32);
    const RowCodec codec(plan.k, 0, format.dim);
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(format.dim));
    std::vector<float> numbers(static_cast<std::size_t>(codec.num_numbers()));
    codec.encode(test::gaussian(codes.size(), 3), codes, numbers);
    for (const Side side : kSides)
      for (const int slot : {0, 9, 31})
        check_own_bits(random_bytes(layout.page_bytes(), 11), codec.layout().row_bytes * 8,
                       [&](std::vector<std::byte>& page) {
                         store_page_row(layout, side, format.type, 1, slot, codes, numbers, page);
                       });
  }
}

TEST_CASE("Exact rows are rounded to bfloat16, survive pages and windows, and touch their own bits only", "[codec]") {
  for (const int dim : {64, 80, 96, 128, 192}) {
    INFO("head_dim " << dim);
    const std::vector<float> row = test::gaussian(static_cast<std::size_t>(dim), 5);
    std::vector<float> rounded = row, back(row.size());
    quantize_exact(rounded);
    LayerPlan plan{
        .layer = 0,
        .geometry = {.num_q_heads = 2, .num_kv_heads = 2, .head_dim = dim, .v_head_dim = dim, .softmax_scale = 1.0},
        .k = {},
        .v = TensorPlan{},
    };
    const PageLayout pages = page_layout_of(plan, 32);
    if (dim * 4 % 128 == 0) plan.v->coder = UniformCoder{.bits = 4, .group_size = dim % 64 ? 32 : 64};
    const WindowLayout windows = window_layouts_of(page_layout_of(plan, 32), {.recent_tokens = 30}, 3).rings;
    for (const Side side : kSides) {
      for (const int slot : {0, 13, 31}) {
        const auto before = random_bytes(pages.page_bytes(), 1);
        check_own_bits(before, dim * 16,
                       [&](std::vector<std::byte>& page) { store_page_row(pages, side, 1, slot, row, page); });
        auto page = before;
        store_page_row(pages, side, 1, slot, row, page);
        load_page_row(pages, side, 1, slot, page, back);
        CHECK(test::first_bit_difference(back, rounded) == "");
      }
      for (const int position : {0, 4, 40, 100}) {
        const int window_row = windows.row(position);
        const auto before = random_bytes(windows.slot_bytes(), 2);
        check_own_bits(before, dim * 16, [&](std::vector<std::byte>& slot) {
          store_window_row(windows, side, 1, window_row, row, slot);
        });
        auto slot = before;
        store_window_row(windows, side, 1, window_row, row, slot);
        load_window_row(windows, side, 1, window_row, slot, back);
        CHECK(test::first_bit_difference(back, rounded) == "");
      }
    }
  }
}

TEST_CASE("Exact rows in pages keep NaN, and turn infinities into NaN", "[codec]") {
  const LayerPlan plan{
      .layer = 0,
      .geometry = {.num_q_heads = 1, .num_kv_heads = 1, .head_dim = 64, .v_head_dim = 64, .softmax_scale = 1.0},
      .k = {},
      .v = TensorPlan{},
  };
  const PageLayout pages = page_layout_of(plan, 16);
  std::vector<float> row = test::gaussian(64, 6), expected = row, back(64);
  row[3] = std::bit_cast<float>(0xffc12345u), row[4] = HUGE_VALF, row[63] = -HUGE_VALF, row[20] = 3.4e38f;
  quantize_exact(expected);
  for (const std::size_t at : {3u, 4u, 63u}) expected[at] = std::bit_cast<float>(0x7fc00000u);
  expected[20] = bf16_to_float(0x7f7f);
  std::vector<std::byte> page(static_cast<std::size_t>(pages.page_bytes()));
  for (const Side side : kSides) {
    store_page_row(pages, side, 0, 5, row, page);
    load_page_row(pages, side, 0, 5, page, back);
    CHECK(test::first_bit_difference(back, expected) == "");
  }
}

TEST_CASE("Pages hold poisoned rows of every format", "[codec]") {
  for (const Format& format : formats()) {
    if (format.dim != 128) continue;
    INFO(name(format));
    const LayerPlan plan = layer_plan(format);
    const PageLayout layout = page_layout_of(plan, 16);
    const RowCodec codec(plan.k, 0, format.dim);
    std::vector<float> row = test::gaussian(static_cast<std::size_t>(format.dim), 5);
    row[97] = -HUGE_VALF;
    std::vector<std::uint8_t> codes(row.size()), back(row.size(), 255);
    std::vector<float> numbers(static_cast<std::size_t>(codec.num_numbers())), numbers_back(numbers.size());
    codec.encode(row, codes, numbers);
    std::vector<std::byte> page = random_bytes(layout.page_bytes(), 3);
    for (const Side side : kSides) {
      store_page_row(layout, side, format.type, 0, 6, codes, numbers, page);
      load_page_row(layout, side, format.type, 0, 6, page, back, numbers_back);
      CHECK(back == std::vector<std::uint8_t>(row.size(), 0));
      CHECK(test::first_bit_difference(numbers_back,
                                       std::vector<float>(numbers.size(), std::bit_cast<float>(0x7fc00000u))) == "");
    }
  }
}

TEST_CASE("Places outside a page and rows of another format are a caller's mistake", "[codec]") {
  const LayerPlan plan = layer_plan({128, 2, 128, UniformLevels::affine, ScaleType::fp16});
  const PageLayout layout = page_layout_of(plan, 16);
  std::vector<std::byte> page(static_cast<std::size_t>(layout.page_bytes()));
  const auto refused = [&](int head, int slot, std::vector<std::uint8_t> codes, std::size_t numbers, std::size_t bytes,
                           ScaleType type = ScaleType::fp16) {
    return test::error_text([&] {
      store_page_row(layout, Side::k, type, head, slot, codes, std::vector<float>(numbers, 0.0f),
                     std::span{page}.first(bytes));
    });
  };
  const std::vector<std::uint8_t> codes(128, 3);
  std::vector<std::uint8_t> wide = codes;
  wide[50] = 4;
  CHECK(refused(1, 15, codes, 2, page.size()) == "no error");
  for (const std::string& text :
       {refused(2, 0, codes, 2, page.size()), refused(-1, 0, codes, 2, page.size()),
        refused(0, 16, codes, 2, page.size()), refused(0, -1, codes, 2, page.size()),
        refused(0, 0, std::vector<std::uint8_t>(127), 2, page.size()), refused(0, 0, codes, 1, page.size()),
        refused(0, 0, codes, 2, page.size() - 1), refused(0, 0, wide, 2, page.size()),
        refused(0, 0, codes, 2, page.size(), ScaleType::fp32)})
    CHECK_THAT(text, StartsWith("internal: "));
  CHECK_THAT(test::error_text([&] { store_page_row(layout, Side::k, 0, 0, std::vector<float>(128), page); }),
             StartsWith("internal: "));
}
