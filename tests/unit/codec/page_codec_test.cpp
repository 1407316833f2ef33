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
#include <array>
#include <bit>
#include <cmath>
#include <functional>
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
    const TensorPlan& plan = vector.side(row.side);
    const ScaleType type = scale_type(plan.coder);
    std::vector<std::uint8_t> codes_back(row.codes.size(), 255);
    std::vector<float> numbers_back(row.numbers.size());
    const TileSide& tiles = row.side == Side::v ? layout.v : layout.k;
    if (tiles.is_bits()) {
      const std::vector<BitSegment> segments = bit_segments(plan, row.head, tiles.head_dim);
      REQUIRE(row_layout(plan, row.head, tiles.head_dim).num_numbers == static_cast<int>(row.numbers.size()));
      store_page_row(layout, row.side, type, row.head, row.place, segments, row.codes, row.numbers, page);
      load_page_row(layout, row.side, type, row.head, row.place, segments, vector.bytes, codes_back, numbers_back);
    } else {
      store_page_row(layout, row.side, type, row.head, row.place, row.codes, row.numbers, page);
      load_page_row(layout, row.side, type, row.head, row.place, vector.bytes, codes_back, numbers_back);
    }
    CHECK(codes_back == row.codes);
    CHECK(test::first_bit_difference(numbers_back, row.numbers) == "");
    REQUIRE(row.index.has_value() == (tiles.index_bytes > 0));
    if (!row.index) continue;
    store_page_index(layout, row.side, row.head, row.place, *row.index, page);
    CHECK(load_page_index(layout, row.side, row.head, row.place, vector.bytes) == *row.index);
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
  CHECK(names.size() >= 45);
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

// Bit tiles

namespace {

/// A side of random rows that only bit tiles hold, or that code tiles hold with indices.
TensorPlan random_side(int dim, int heads, test::Random& random) {
  const auto below = [&](int n) { return static_cast<int>(random.bits() % static_cast<std::uint64_t>(n)); };
  const ScaleType type =
      std::array{ScaleType::fp16, ScaleType::bf16, ScaleType::fp32}[static_cast<std::size_t>(below(3))];
  TensorPlan plan;
  plan.rotation.scope = Scope::kv_head;
  if (below(2)) plan.centroids = Centroids{.count = below(2) ? 256 : 257};
  if (below(2)) {
    BitAllocation allocation;
    for (int head = 0; head < heads; ++head) {
      const int most = below(9);
      const auto first = static_cast<std::ptrdiff_t>(allocation.channel_bits.size());
      for (int channel = 0; channel < dim; ++channel)
        allocation.channel_bits.push_back(static_cast<std::uint8_t>(below(most + 1)));
      std::sort(allocation.channel_bits.begin() + first, allocation.channel_bits.end(), std::greater<>{});
    }
    if (below(2)) allocation.segment_gain.assign(static_cast<std::size_t>(heads * kGainWidths), 1.0f);
    plan.allocation = allocation;
    plan.coder = CodebookCoder{.bits = 8, .group_size = 0, .scale_type = type};
    return plan;
  }
  const int group = below(2) ? dim : dim / 2, bits = 1 + below(8);
  switch (below(3)) {
    case 0: plan.coder = TrellisCoder{.bits = bits, .group_size = group, .scale_type = type}; break;
    case 1: plan.coder = UniformCoder{.bits = bits, .group_size = group, .scale_type = type}; break;
    default:
      plan.coder = UniformCoder{.bits = bits, .group_size = group, .scale_type = type, .zero = ZeroKind::integer};
  }
  return plan;
}

struct BitRow {
  std::vector<BitSegment> segments;
  std::vector<std::uint8_t> codes;
  std::vector<float> numbers;
  int centroid = 0;
};

/// A row whose codes and numbers are random.
BitRow random_row(const TensorPlan& plan, int head, int dim, test::Random& random) {
  BitRow row{bit_segments(plan, head, dim), std::vector<std::uint8_t>(static_cast<std::size_t>(dim), 0), {}};
  for (const BitSegment& segment : row.segments)
    for (int i = 0; i < segment.channels; ++i)
      row.codes[static_cast<std::size_t>(segment.first_channel + i)] =
          static_cast<std::uint8_t>(random.bits() & ((1u << segment.bits) - 1));
  for (int i = 0; i < row_layout(plan, head, dim).num_numbers; ++i)
    row.numbers.push_back(static_cast<float>(random.bits() % 255) - 127.0f);  // all scale types hold it
  if (plan.centroids) row.centroid = static_cast<int>(random.bits() % static_cast<unsigned>(plan.centroids->count));
  return row;
}

LayerPlan random_layer(std::uint64_t seed) {
  test::Random random(seed);
  const auto random_dim = [&] {
    const auto bits = static_cast<int>(random.bits() % 480);
    return bits % 3 ? 2 * (1 + bits / 6) : 64 * (1 + bits % 4);  // whole steps every third time: code tiles, too
  };
  const int dim = random_dim(), v_dim = random_dim();
  return {
      .layer = 0,
      .geometry = {.num_q_heads = 3, .num_kv_heads = 3, .head_dim = dim, .v_head_dim = v_dim, .softmax_scale = 1.0},
      .k = random_side(dim, 3, random),
      .v = random_side(v_dim, 3, random),
  };
}

/// A layer's pages, and access to rows of both kinds of tiles.
struct RandomPages {
  LayerPlan plan;
  PageLayout layout;
  const TensorPlan& of(Side side) const { return side == Side::v ? *plan.v : plan.k; }
  const TileSide& tiles(Side side) const { return side == Side::v ? layout.v : layout.k; }

  void store(Side side, int head, int slot, const BitRow& row, std::vector<std::byte>& page) const {
    const ScaleType type = scale_type(of(side).coder);
    if (tiles(side).is_bits())
      store_page_row(layout, side, type, head, slot, row.segments, row.codes, row.numbers, page);
    else
      store_page_row(layout, side, type, head, slot, row.codes, row.numbers, page);
    if (of(side).centroids) store_page_index(layout, side, head, slot, row.centroid, page);
  }
  bool holds(Side side, int head, int slot, const BitRow& row, const std::vector<std::byte>& page) const {
    const ScaleType type = scale_type(of(side).coder);
    std::vector<std::uint8_t> codes(row.codes.size(), 255);
    std::vector<float> numbers(row.numbers.size());
    if (tiles(side).is_bits())
      load_page_row(layout, side, type, head, slot, row.segments, page, codes, numbers);
    else
      load_page_row(layout, side, type, head, slot, page, codes, numbers);
    return codes == row.codes && numbers == row.numbers &&
           (!of(side).centroids || load_page_index(layout, side, head, slot, page) == row.centroid);
  }
};

RandomPages random_pages(std::uint64_t seed, int page_size) {
  const LayerPlan plan = random_layer(seed);
  return {plan, page_layout_of(plan, page_size)};
}

}  // namespace

TEST_CASE("Rows of random plans survive a full page, beside each other and over old bytes", "[codec][property]") {
  int bit_sides = 0, code_sides = 0;
  for (std::uint64_t seed = 1; seed <= 150; ++seed) {
    const int page_size = seed % 2 ? 16 : 32;
    const RandomPages pages = random_pages(seed, page_size);
    INFO("seed " << seed << ": " << side_name(pages.layout.k, false) << ", " << side_name(pages.layout.v, false));
    test::Random random(1000 + seed);
    std::vector<std::byte> page = random_bytes(pages.layout.page_bytes(), seed);
    std::vector<BitRow> rows;
    const auto for_each_row = [&](const auto& visit) {
      for (const Side side : kSides)
        for (int head = 0; head < 3; ++head)
          for (int slot = 0; slot < page_size; ++slot) visit(side, head, slot);
    };
    for_each_row([&](Side side, int head, int slot) {
      rows.push_back(random_row(pages.of(side), head, pages.tiles(side).head_dim, random));
      pages.store(side, head, slot, rows.back(), page);
    });
    std::size_t next = 0;
    bool equal = true;
    for_each_row(
        [&](Side side, int head, int slot) { equal = equal && pages.holds(side, head, slot, rows[next++], page); });
    CHECK(equal);
    // The rows are all that a page has: another page with them has the same bytes.
    std::vector<std::byte> again(page.size());
    next = 0;
    for_each_row([&](Side side, int head, int slot) { pages.store(side, head, slot, rows[next++], again); });
    CHECK(first_difference(again, page) == "");
    for (const Side side : kSides) ++(pages.tiles(side).is_bits() ? bit_sides : code_sides);
  }
  CHECK((bit_sides >= 200 && code_sides >= 5));
}

TEST_CASE("Storing a row in bit tiles sets all bits of its words, numbers and index, and no other", "[codec]") {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    const RandomPages pages = random_pages(seed, 32);
    INFO("seed " << seed << ": " << side_name(pages.layout.k, false) << ", " << side_name(pages.layout.v, false));
    test::Random random(seed);
    for (const Side side : kSides)
      for (const int slot : {0, 9, 31}) {
        const BitRow row = random_row(pages.of(side), 1, pages.tiles(side).head_dim, random);
        check_own_bits(random_bytes(pages.layout.page_bytes(), 11), pages.tiles(side).bytes() / kTileTokens * 8,
                       [&](std::vector<std::byte>& page) { pages.store(side, 1, slot, row, page); });
      }
  }
}

TEST_CASE("Bits and numbers that a head does not have are zero", "[codec]") {
  LayerPlan plan = layer_plan({64, 2, 64, UniformLevels::symmetric, ScaleType::fp16});
  BitAllocation allocation;
  allocation.channel_bits.assign(64, 6);
  allocation.channel_bits.resize(128, 0);
  allocation.channel_bits[63] = 1;  // head 0: 63 channels of 6 bits, 1 of 1
  allocation.channel_bits[64] = 3;  // head 1: one channel of 3 bits
  plan.k.allocation = allocation;
  plan.k.rotation.scope = Scope::kv_head;
  const PageLayout layout = page_layout_of(plan, 16);
  CHECK(side_name(layout.k, false) == "w12n2");
  std::vector<std::byte> page(static_cast<std::size_t>(layout.page_bytes()), std::byte{0xff});
  std::vector<std::uint8_t> codes(64, 0);
  codes[0] = 7;
  for (int slot = 0; slot < 16; ++slot)
    store_page_row(layout, Side::k, ScaleType::fp16, 1, slot, bit_segments(plan.k, 1, 64), codes,
                   std::vector<float>{1.0f}, page);
  const auto tile = std::span{page}.subspan(static_cast<std::size_t>(layout.key_tile(1, 0)));
  int bits = 0;
  for (int byte = 0; byte < layout.k.bytes(); ++byte)
    bits += std::popcount(std::to_integer<unsigned>(tile[static_cast<std::size_t>(byte)]));
  CHECK(bits == 16 * (3 + 4));  // fp16 1.0 is 0x3c00
}

TEST_CASE("Rows that do not go with the tiles of bits are a caller's mistake", "[codec]") {
  LayerPlan plan = layer_plan({64, 1, 64, UniformLevels::symmetric, ScaleType::fp16});
  plan.v->centroids = Centroids{.count = 8};
  const PageLayout layout = page_layout_of(plan, 16);
  std::vector<std::byte> page(static_cast<std::size_t>(layout.page_bytes()));
  const std::vector<BitSegment> whole = bit_segments(plan.k, 0, 64);
  const auto refused = [&](const std::vector<BitSegment>& segments, const std::vector<std::uint8_t>& codes,
                           std::size_t numbers, ScaleType type = ScaleType::fp16, int slot = 0) {
    return test::error_text([&] {
      store_page_row(layout, Side::k, type, 0, slot, segments, codes, std::vector<float>(numbers, 0.0f), page);
    });
  };
  const std::vector<std::uint8_t> ones(64, 1), twos(64, 2), few(63, 0);
  CHECK(refused(whole, ones, 1) == "no error");
  CHECK(refused(whole, ones, 0) == "no error");  // a head without numbers
  const std::vector<BitSegment> half = {{1, 0, 32, 0}}, beyond = {{1, 0, 65, 0}}, wide = {{2, 0, 64, 0}},
                                late = {{1, 0, 64, 1}}, none = {{0, 0, 64, 0}};
  for (const std::string& text :
       {refused(whole, twos, 1), refused(whole, few, 1), refused(whole, ones, 2), refused(half, ones, 1),
        refused(beyond, ones, 1), refused(wide, ones, 1), refused(late, ones, 1), refused(none, ones, 1),
        refused(whole, ones, 1, ScaleType::fp32), refused(whole, ones, 1, ScaleType::fp16, 16)})
    CHECK_THAT(text, StartsWith("internal: "));
  const auto index_refused = [&](Side side, int centroid) {
    return test::error_text([&] { store_page_index(layout, side, 0, 0, centroid, page); });
  };
  CHECK(index_refused(Side::v, 255) == "no error");
  for (const std::string& text : {index_refused(Side::v, 256), index_refused(Side::v, -1), index_refused(Side::k, 0)})
    CHECK_THAT(text, StartsWith("internal: "));
  CHECK_THAT(test::error_text(
                 [&] { store_page_row(layout, Side::k, ScaleType::fp16, 0, 0, ones, std::vector<float>(1), page); }),
             StartsWith("internal: "));
}
