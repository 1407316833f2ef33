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
  CHECK(refusal([](LayerPlan& p) { p.k.coder = CodebookCoder{}; }) ==
        "unsupported: pages: layer 3 k: coder: supported affine, symmetric, exact, found codebook");
  CHECK(refusal([](LayerPlan& p) { p.v->coder = TrellisCoder{}; }) ==
        "unsupported: pages: layer 3 v: coder: supported affine, symmetric, exact, found trellis");
  CHECK(refusal([](LayerPlan& p) { p.v->centroids = Centroids{.count = 7}; }) ==
        "unsupported: pages: layer 3 v: centroids: supported none, found 7");
  CHECK(refusal([](LayerPlan& p) { p.v->allocation = BitAllocation{}, values(p).group_size = 0; }) ==
        "unsupported: pages: layer 3 v: widths of channels: supported one for all, found mixed widths");
  CHECK(refusal([](LayerPlan& p) { p.v.reset(); }) ==
        "unsupported: pages: layer 3 v: values: supported layers that have them, found none");
  CHECK(refusal([](LayerPlan& p) { keys(p).bits = 1; }) ==
        "unsupported: pages: layer 3 k: bits: supported 2, 3, 4 and 16 (exact), found 1");
  CHECK(refusal([](LayerPlan& p) { values(p).bits = 8; }) ==
        "unsupported: pages: layer 3 v: bits: supported 2, 3, 4 and 16 (exact), found 8");
  CHECK(refusal([](LayerPlan& p) { keys(p).group_size = 16; }) ==
        "unsupported: pages: layer 3 k: group_size: supported multiples of 32, found 16");
  CHECK(refusal([](LayerPlan& p) { keys(p).group_size = 48; }) ==
        "unsupported: pages: layer 3 k: group_size: supported multiples of 32, found 48");
}

TEST_CASE("A head_dim whose pieces are not whole words is refused", "[plan]") {
  const auto with = [](int dim, int bits) {
    return refusal([=](LayerPlan& p) { p.geometry.head_dim = dim, p.k.coder = symmetric(bits, dim % 32 ? 32 : dim); });
  };
  CHECK(with(80, 2) == "unsupported: pages: layer 3 k: head_dim: supported multiples of 64 with 2 bits, found 80");
  CHECK(with(80, 4) == "unsupported: pages: layer 3 k: head_dim: supported multiples of 32 with 4 bits, found 80");
  CHECK(with(96, 2) == "unsupported: pages: layer 3 k: head_dim: supported multiples of 64 with 2 bits, found 96");
  CHECK(with(192, 3) == "unsupported: pages: layer 3 k: head_dim: supported multiples of 128 with 3 bits, found 192");
  for (const int dim : {128, 256}) CHECK(with(dim, 3) == "no error");
  for (const int dim : {32, 64, 96, 128, 160, 192, 224, 256}) CHECK(with(dim, 4) == "no error");
  for (const int dim : {64, 128, 192, 256}) CHECK(with(dim, 2) == "no error");
  CHECK(refusal([](LayerPlan& p) { p.geometry.head_dim = 72, p.k.coder = ExactCoder{}; }) ==
        "unsupported: pages: layer 3 k: head_dim of exact rows: supported multiples of 16, found 72");
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
        keys(p).bits = 5, keys(p).group_size = 48;
        p.k.centroids = Centroids{.count = 2};
        p.v->coder = TrellisCoder{};
      },
      8);
  CHECK_THAT(text, StartsWith("unsupported: pages: layer 3: page_size"));
  for (const char* part : {"k: centroids", "k: bits", "k: group_size", "v: coder"}) CHECK_THAT(text, Contains(part));
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
