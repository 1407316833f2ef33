#include <kvq/plan/layer_pages.h>

#include "support/error_of.h"

#include <catch2/catch.hpp>

#include <functional>

using namespace kvq;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;
using test::error_text;

namespace {

UniformCoder symmetric(int bits, int group) {
  return {.bits = bits, .group_size = group, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
}

/// Keys of 4 bits affine, values of 2 bits symmetric, of different head_dim.
LayerPlan supported() {
  LayerPlan plan{
      .layer = 3,
      .geometry = {.num_q_heads = 4, .num_kv_heads = 2, .head_dim = 192, .v_head_dim = 128, .softmax_scale = 1.0},
      .k = {},
      .v = TensorPlan{},
  };
  plan.k.coder = UniformCoder{.bits = 4, .group_size = 64};
  plan.v->coder = symmetric(2, 128);
  return plan;
}

std::string refusal(const std::function<void(LayerPlan&)>& change, int page_size = 32) {
  LayerPlan plan = supported();
  change(plan);
  return error_text([&] { page_layout_of(plan, page_size); });
}

UniformCoder& keys(LayerPlan& plan) { return std::get<UniformCoder>(plan.k.coder); }
UniformCoder& values(LayerPlan& plan) { return std::get<UniformCoder>(plan.v->coder); }

}  // namespace

TEST_CASE("A plan that fits becomes a layout with each side's own format", "[plan]") {
  for (const int page_size : {16, 32, 64, 128}) {
    const PageLayout layout = page_layout_of(supported(), page_size);
    CHECK(layout.num_kv_heads == 2);
    CHECK(layout.page_size == page_size);
    CHECK((layout.k.head_dim == 192 && layout.k.bits == 4 && layout.k.group_size == 64 && layout.k.numbers == 2));
    CHECK((layout.v.head_dim == 128 && layout.v.bits == 2 && layout.v.group_size == 128 && layout.v.numbers == 1));
    CHECK(layout.page_bytes() == 2 * page_size * (192 / 2 + 3 * 4 + 128 / 4 + 2));
  }
  LayerPlan plan = supported();
  keys(plan).scale_type = ScaleType::bf16;
  plan.v->coder = ExactCoder{};
  plan.geometry.v_head_dim = 80;
  const PageLayout layout = page_layout_of(plan, 16);
  CHECK((layout.v.exact() && layout.v.head_dim == 80 && layout.v.groups() == 0));
}

TEST_CASE("A side's layout has its numbers: type, zero points", "[plan]") {
  LayerPlan plan = supported();
  const auto sides = [&] { return page_layout_of(plan, 16); };
  const auto name_of = [&](Side side) {
    return side == Side::k ? side_name(sides().k, has_bfloat_scales(plan.k))
                           : side_name(sides().v, has_bfloat_scales(*plan.v));
  };
  CHECK((name_of(Side::k) == "u4g64" && name_of(Side::v) == "s2g128"));
  values(plan).bits = 3, keys(plan).zero = ZeroKind::integer;
  CHECK((name_of(Side::k) == "u4g64z" && name_of(Side::v) == "s3g128"));
  CHECK((sides().k.integer_zero && sides().k.numbers == 2 && sides().k.number_size == 2));
  values(plan).scale_type = ScaleType::bf16, keys(plan).scale_type = ScaleType::fp32;
  CHECK((name_of(Side::k) == "u4g64zf" && name_of(Side::v) == "s3g128b"));
  CHECK((sides().k.number_size == 4 && sides().v.number_size == 2 && !sides().v.integer_zero));
  CHECK(sides().page_bytes() == 2 * 16 * (192 / 2 + 3 * 2 * 4 + 3 * 128 / 8 + 2));
  values(plan).scale_type = ScaleType::fp32, keys(plan).zero = ZeroKind::floating;
  CHECK((name_of(Side::k) == "u4g64f" && name_of(Side::v) == "s3g128f"));
  for (const ScaleType type : {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32}) {
    values(plan).scale_type = type;
    CHECK(number_type_of(sides().v, has_bfloat_scales(*plan.v)) == type);
  }
  plan.v->coder = ExactCoder{};
  CHECK((name_of(Side::v) == "bf16" && !sides().v.integer_zero && sides().v.number_size == 2));
}

TEST_CASE("What pages do not hold is refused by name, with what they do", "[plan]") {
  CHECK(refusal([](LayerPlan&) {}) == "no error");
  CHECK(refusal([](LayerPlan&) {}, 48) ==
        "unsupported: pages: layer 3: page_size: supported 16, 32, 64, 128, found 48");
  CHECK(refusal([](LayerPlan& p) { p.v.reset(); }) ==
        "unsupported: pages: layer 3 v: values: supported layers that have them, found none");
  CHECK(refusal([](LayerPlan& p) { p.geometry.head_dim = 72, p.k.coder = ExactCoder{}; }) ==
        "unsupported: pages: layer 3 k: head_dim of exact rows: supported multiples of 16, found 72");
}

TEST_CASE("Code tiles hold 2, 3 and 4 bits in groups of whole steps, bit tiles all other rows", "[plan]") {
  const auto name_with = [](const std::function<void(LayerPlan&)>& change) {
    LayerPlan plan = supported();
    change(plan);
    return side_name(page_layout_of(plan, 16).k, has_bfloat_scales(plan.k));
  };
  const auto keys_of = [&](int dim, const Coder& coder) {
    return name_with([&](LayerPlan& p) { p.geometry.head_dim = dim, p.k.coder = coder; });
  };
  for (const int dim : {128, 256}) CHECK(keys_of(dim, symmetric(3, dim)) == "s3g" + std::to_string(dim));
  for (const int dim : {32, 64, 96, 128, 160, 192, 224, 256}) CHECK(keys_of(dim, symmetric(4, 32)) == "s4g32");
  for (const int dim : {64, 128, 192, 256}) CHECK(keys_of(dim, symmetric(2, 32)) == "s2g32");
  CHECK(keys_of(192, UniformCoder{.bits = 1, .group_size = 64}) == "w6n6");
  CHECK(keys_of(128, symmetric(8, 128)) == "w32n1");
  CHECK(keys_of(192, UniformCoder{.bits = 4, .group_size = 16}) == "w24n24");
  CHECK(keys_of(192, UniformCoder{.bits = 4, .group_size = 48}) == "w24n8");
  CHECK(keys_of(80, symmetric(2, 80)) == "w5n1");
  CHECK(keys_of(80, symmetric(4, 80)) == "w10n1");
  CHECK(keys_of(96, symmetric(2, 96)) == "w6n1");
  CHECK(keys_of(192, symmetric(3, 64)) == "w18n3");
  CHECK(keys_of(36, symmetric(1, 36)) == "w2n1");
  CHECK(keys_of(128, CodebookCoder{}) == "w8n1");
  CHECK(keys_of(128, TrellisCoder{.scale_type = ScaleType::bf16}) == "w8n1b");
  CHECK(keys_of(128, UniformCoder{.bits = 5, .scale_type = ScaleType::fp32}) == "w20n2f");
  CHECK(keys_of(128, UniformCoder{.bits = 5, .scale_type = ScaleType::bf16, .zero = ZeroKind::integer}) == "w20n2zb");
}

TEST_CASE("A bit tile has what its rows need", "[plan]") {
  LayerPlan plan = supported();
  plan.k.coder = UniformCoder{.bits = 5, .group_size = 24, .scale_type = ScaleType::fp32, .zero = ZeroKind::integer};
  const TileSide side = page_layout_of(plan, 16).k;
  CHECK((side.is_bits() && side.head_dim == 192 && side.group_size == 192 && side.groups() == 1));
  CHECK((side.row_words == 30 && side.numbers == 16 && side.number_size == 4 && side.integer_zero));
  CHECK(side.bytes() == 16 * (30 * 4 + 16 * 4));
}

TEST_CASE("The index of a centroid is in both kinds of tiles", "[plan]") {
  LayerPlan plan = supported();
  const auto value_name = [&] { return side_name(page_layout_of(plan, 16).v, has_bfloat_scales(*plan.v)); };
  const int plain = page_layout_of(plan, 16).v.bytes();
  plan.v->centroids = Centroids{.count = 7};
  CHECK(value_name() == "s2g128i1");
  CHECK(page_layout_of(plan, 16).v.bytes() == plain + 16);
  plan.v->centroids->count = 256;
  CHECK(value_name() == "s2g128i1");
  plan.v->centroids->count = 257, values(plan).scale_type = ScaleType::fp32;
  CHECK(value_name() == "s2g128fi2");
  values(plan).bits = 1;
  CHECK(value_name() == "w4n1fi2");
  CHECK(page_layout_of(plan, 16).v.bytes() == 16 * (4 * 4 + 4 + 2));
}

TEST_CASE("Mixed rows have the words and numbers of the longest head, and segments of each head", "[plan]") {
  LayerPlan plan = supported();
  plan.k.coder = symmetric(8, 0);
  BitAllocation allocation;
  const auto add_head = [&](const std::vector<std::pair<int, int>>& runs) {  // (channels, width)
    for (const auto& [channels, width] : runs)
      allocation.channel_bits.insert(allocation.channel_bits.end(), static_cast<std::size_t>(channels),
                                     static_cast<std::uint8_t>(width));
  };
  add_head({{2, 8}, {33, 5}, {57, 1}, {100, 0}});  // 16 + 165 + 57 = 238 bits, three numbers
  add_head({{64, 4}, {128, 0}});                   // 256 bits, one number
  plan.k.allocation = allocation;
  plan.k.rotation.scope = Scope::kv_head;
  const auto name_of_keys = [&] { return side_name(page_layout_of(plan, 16).k, false); };
  CHECK(name_of_keys() == "w8n3");
  const std::vector<BitSegment> first = bit_segments(plan.k, 0, 192), second = bit_segments(plan.k, 1, 192);
  REQUIRE(first.size() == 3);
  const auto is = [](const BitSegment& s, int bits, int channel, int channels, int bit) {
    return s.bits == bits && s.first_channel == channel && s.channels == channels && s.first_bit == bit;
  };
  CHECK((is(first[0], 8, 0, 2, 0) && is(first[1], 5, 2, 33, 16) && is(first[2], 1, 35, 57, 181)));
  REQUIRE(second.size() == 1);
  CHECK(is(second[0], 4, 0, 64, 0));
  plan.k.allocation->segment_gain.assign(2 * kGainWidths, 1.0f);
  CHECK(name_of_keys() == "w8n1");
  plan.k.allocation->channel_bits.assign(2 * 192, 0);
  CHECK(name_of_keys() == "w1n0");
  CHECK(bit_segments(plan.k, 0, 192).empty());
  plan.k.allocation->channel_bits.assign(2 * 192, 2);  // of one width, but with segments and a scale for all channels
  CHECK(name_of_keys() == "w12n1");
}

TEST_CASE("Rows of one width are one segment", "[plan]") {
  const std::vector<BitSegment> segments = bit_segments(supported().k, 1, 192);
  REQUIRE(segments.size() == 1);
  CHECK((segments[0].bits == 4 && segments[0].first_channel == 0 && segments[0].channels == 192));
  CHECK(segments[0].first_bit == 0);
}

TEST_CASE("A symmetric coder's zero does not matter, and neither do rotation, center and clip", "[plan]") {
  CHECK(refusal([](LayerPlan& p) { values(p).zero = ZeroKind::integer; }) == "no error");
  CHECK(refusal([](LayerPlan& p) {
          p.k.rotation.kind = RotationKind::dense;
          p.k.center = std::vector<float>(2 * 192, 1.0f);
          p.k.clip_ratio = {0.9, 0.9};
        }) == "no error");
}

TEST_CASE("All faults of a plan are told at once", "[plan]") {
  const std::string text = refusal(
      [](LayerPlan& p) {
        p.k.coder = p.v->coder = ExactCoder{};
        p.geometry.head_dim = 72, p.geometry.v_head_dim = 40;
      },
      8);
  CHECK_THAT(text, StartsWith("unsupported: pages: layer 3: page_size"));
  for (const char* part : {"k: head_dim of exact rows", "found 72", "v: head_dim of exact rows", "found 40"})
    CHECK_THAT(text, Contains(part));
}

TEST_CASE("Only pages of 16, 32, 64 and 128 tokens are page sizes", "[plan]") {
  for (int tokens = -1; tokens <= 300; ++tokens)
    CHECK(is_page_size(tokens) == (tokens == 16 || tokens == 32 || tokens == 64 || tokens == 128));
}

TEST_CASE("Sinks and rings have whole tiles, and the order of the coded values", "[plan]") {
  const PageLayout pages = page_layout_of(supported(), 64);
  const auto [sinks, rings] = window_layouts_of(pages, {.sink_tokens = 5, .recent_tokens = 128}, 1);
  CHECK(sinks.rows == 16);
  CHECK(rings.rows == 144);
  CHECK(sinks.slot_bytes() == 2 * 16 * 2 * (192 + 128));
  CHECK(rings.slot_bytes() == 2 * 144 * 2 * (192 + 128));
  for (const WindowLayout& windows : {sinks, rings}) {
    CHECK(windows.num_kv_heads == 2);
    for (int channel = 0; channel < 128; ++channel)
      CHECK(windows.value_offset(0, channel) ==
            windows.k.bytes() + exact_offset(128, 0, value_place(pages.v, channel)));
  }
}

TEST_CASE("A ring has room for the recent tokens and for those that may be taken back", "[plan]") {
  const PageLayout pages = page_layout_of(supported(), 64);
  const auto ring_rows = [&](int recent, int max_rollback) {
    return window_layouts_of(pages, {.sink_tokens = 0, .recent_tokens = recent}, max_rollback).rings.rows;
  };
  CHECK(ring_rows(120, 8) == 128);
  CHECK(ring_rows(120, 9) == 144);
  CHECK(ring_rows(1, 0) == 16);
}

TEST_CASE("A pool whose tokens are 0 has no bytes", "[plan]") {
  const PageLayout pages = page_layout_of(supported(), 64);
  const WindowLayouts none = window_layouts_of(pages, {}, 8);
  CHECK(none.sinks.slot_bytes() == 0);
  CHECK(none.rings.slot_bytes() == 0);
  const WindowLayouts sinks = window_layouts_of(pages, {.sink_tokens = 17, .recent_tokens = 0}, 8);
  CHECK(sinks.sinks.tiles() == 2);
  CHECK(sinks.rings.slot_bytes() == 0);
}
