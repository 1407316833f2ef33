#include <kvq/runtime/kernels/demote/variant.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>

#include <catch2/catch.hpp>

#include <set>
#include <string>

using namespace kvq;

namespace {

alignas(16) std::byte memory[16];

/// Valid parameters; no test follows the pointers.
DemoteParams good(const DemoteVariant& variant) {
  static std::int64_t longs[1];
  static std::int32_t ints[1];
  static DemoteLayer layers[1];
  DemoteParams p;
  p.num_layers = 3, p.num_kv_heads = 2, p.max_demotions = 7;
  p.layers = layers, p.num_demotions = ints, p.demote_from = p.demote_to = longs;
  p.window_layout = {2, {variant.k.head_dim, 16, 0, 0}, {variant.v.head_dim, 16, 0, 0}, variant.v, 16, 32};
  p.page_stride = PageLayout{variant.k, variant.v, 2, 64}.page_bytes();
  return p;
}
DemoteLayer good_layer(const DemoteVariant& variant) {
  DemoteLayer layer;
  layer.windows = layer.pages = memory;
  layer.k.rule = variant.k.numbers == 2 ? ScaleRule::minmax : ScaleRule::norm;
  layer.v.rule = variant.v.numbers == 2 ? ScaleRule::minmax : ScaleRule::norm;
  return layer;
}

bool same(const TileSide& a, const TileSide& b) {
  return a.head_dim == b.head_dim && a.bits == b.bits && a.group_size == b.group_size && a.numbers == b.numbers;
}

}  // namespace

TEST_CASE("Demotion variants have names of their own and take sound parameters", "[runtime]") {
  std::set<std::string> names;
  for (const DemoteVariant* row : demote_variants()) {
    CHECK(names.insert(row->name).second);
    CHECK(std::string(check_demote(*row, good(*row)).message()) == "");
    CHECK(std::string(check_demote_layer(*row, good_layer(*row)).message()) == "");
  }
}

TEST_CASE("What can be written can be demoted", "[runtime]") {
  for (const WriteVariant* write : write_variants()) {
    CAPTURE(write->name);
    int found = 0;
    for (const DemoteVariant* row : demote_variants())
      found += same(row->k, write->k) && same(row->v, write->v) && row->k_bfloat == write->k_bfloat &&
               row->v_bfloat == write->v_bfloat;
    CHECK(found == 1);
  }
}

TEST_CASE("Demotions that cannot be are refused by name", "[runtime]") {
  const DemoteVariant& variant = *demote_variants().front();
  REQUIRE(variant.k.numbers == 2);
  const auto refusal = [&](auto change) {
    DemoteParams p = good(variant);
    change(p);
    const Status status = check_demote(variant, p);
    CHECK_FALSE(status.ok());
    return std::string(status.message());
  };
  using Catch::Contains;
  CHECK_THAT(refusal([](DemoteParams& p) { p.max_demotions = -1; }), Contains("-1 demotions"));
  CHECK_THAT(refusal([](DemoteParams& p) { p.num_layers = 70000; }), Contains("70000 layers"));
  CHECK_THAT(refusal([](DemoteParams& p) { p.num_kv_heads = 32768; }), Contains("demote: 32768 KV heads; supported"));
  CHECK_THAT(refusal([](DemoteParams& p) { p.page_shift = 3; }), Contains("16, 32 and 64"));
  CHECK_THAT(refusal([](DemoteParams& p) { p.layers = nullptr; }), Contains("layers"));
  CHECK_THAT(refusal([](DemoteParams& p) { p.page_stride -= 16; }), Contains("bytes apart"));
  CHECK_THAT(refusal([](DemoteParams& p) { p.page_stride = std::int64_t{1} << 32; }),
             Contains("pages 4294967296 bytes apart; supported are fewer than 2^32"));
  CHECK_THAT(refusal([](DemoteParams& p) { p.window_layout.num_kv_heads = 3; }), Contains("window layout"));
  CHECK_THAT(refusal([](DemoteParams& p) { p.window_layout.coded_v.bits = 4; }), Contains("window layout"));
  CHECK_THAT(refusal([](DemoteParams& p) { p.window_layout.ring_rows = 40; }), Contains("window layout"));
  DemoteLayer layer = good_layer(variant);
  layer.v.rule = ScaleRule::norm;
  CHECK_THAT(check_demote_layer(variant, layer).message(), Contains("norm does not go with affine"));
  layer = good_layer(*demote_variants()[1]);
  REQUIRE(layer.k.rule == ScaleRule::norm);
  static std::int32_t ranks[1];
  layer.k.clip_ranks = ranks;
  CHECK_THAT(check_demote_layer(*demote_variants()[1], layer).message(), Contains("k: a clip goes with"));
  layer = good_layer(variant);
  layer.k.clip_ranks = ranks;
  CHECK(check_demote_layer(variant, layer).ok());
  layer.windows = nullptr;
  CHECK_THAT(check_demote_layer(variant, layer).message(), Contains("windows and pages"));
}
