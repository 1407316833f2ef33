#include <kvq/runtime/kernels/common/prefill_tiles.h>
#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/runtime/kernels/prefill/variant.h>

#include <catch2/catch.hpp>

#include <set>
#include <string>

using namespace kvq;

namespace {

const TileSide kInt2{128, 2, 128, 2}, kExact{128, 16, 128, 0};

const DequantizeVariant& int2() {
  const DequantizeVariant* rows = find_dequantize_variant({.k = kInt2, .v = kInt2});
  REQUIRE(rows != nullptr);
  return *rows;
}
const PrefillVariant& variant() {
  const PrefillVariant* row = find_prefill_variant(int2());
  REQUIRE(row != nullptr);
  return *row;
}

PrefillLaunch good_launch() {
  PrefillLaunch launch;
  launch.shape = {.batch = 2, .num_q_heads = 8, .num_kv_heads = 2, .max_queries = 100, .max_keys = 1000};
  launch.workspace_bytes = 1 << 20;
  return launch;
}

/// Valid parameters; no test follows the pointers.
PrefillParams good() {
  alignas(16) static std::byte memory[16];
  static std::int32_t numbers[4];
  PrefillParams p;
  PagedCacheView& c = p.cache;
  c.batch = 2, c.num_kv_heads = 2;
  c.seq_lens = c.page_table = numbers;
  c.pages = memory, c.page_stride = 2 * 64 * 72, c.page_table_stride = 4;
  p.num_q_heads = 8, p.softmax_scale = 0.1f;
  p.q_indptr = numbers;
  p.q = p.k = p.v = p.out = memory;
  p.q_stride = p.out_stride = 8 * 128, p.k_stride = p.v_stride = 2 * 128;
  p.workspace = memory;
  return p;
}

}  // namespace

TEST_CASE("Rows of prefill go with what is dequantized", "[runtime]") {
  std::set<std::string> names;
  for (const PrefillVariant* row : prefill_variants()) CHECK(names.insert(row->name).second);
  CHECK(names.size() >= 3);
  for (const DequantizeVariant* rows : dequantize_variants())
    if (const PrefillVariant* row = find_prefill_variant(*rows)) {
      CHECK(row->head_dim == rows->k.head_dim);
      CHECK(row->bf16 == rows->bf16);
    } else {
      CHECK(rows->k.head_dim % 128 != 0);  // 64 is built for one type only, 96 and 192 for none
    }
}

TEST_CASE("Tiles of the workspace hold each channel of each token once", "[runtime]") {
  for (const int head_dim : {64, 128, 256}) {
    const PrefillTiles tiles{head_dim};
    std::set<int> places;
    for (int token = 0; token < tiles.tokens(); ++token)
      for (int channel = 0; channel < head_dim; ++channel) places.insert(tiles.offset(token, channel));
    CHECK(static_cast<int>(places.size()) == tiles.tokens() * head_dim);
    CHECK(*places.begin() == 0);
    CHECK(*places.rbegin() == tiles.side_bytes() - 2);
  }
}

TEST_CASE("Shapes that cannot be planned are refused by name", "[runtime]") {
  const auto refusal = [](auto change) {
    PrefillShape shape = good_launch().shape;
    change(shape);
    const Status status = check_prefill_shape(variant(), int2(), shape);
    CHECK_FALSE(status.ok());
    return std::string(status.message());
  };
  using Catch::Contains;
  REQUIRE(std::string(check_prefill_shape(variant(), int2(), good_launch().shape).message()) == "");
  CHECK_THAT(refusal([](PrefillShape& s) { s.batch = -1; }), Contains("batch of -1"));
  CHECK_THAT(refusal([](PrefillShape& s) { s.max_keys = 99; }), Contains("up to 100 among up to 99 keys"));
  CHECK_THAT(refusal([](PrefillShape& s) { s.workspace_bytes = -5; }), Contains("-5 bytes"));
  CHECK_THAT(refusal([](PrefillShape& s) { s.num_q_heads = 7; }), Contains("7 query heads and 2 KV heads"));
  CHECK_THAT(refusal([](PrefillShape& s) { s.num_q_heads = s.num_kv_heads = 32768; }),
             Contains("prefill: 32768 KV heads; supported"));
  CHECK_THAT(refusal([](PrefillShape& s) { s.num_q_heads = 34; }), Contains("at most 16"));
  CHECK_THAT(refusal([](PrefillShape& s) { s.max_keys = s.max_queries = 1 << 30; }), Contains("more than one launch"));
  const DequantizeVariant* narrow = find_dequantize_variant({.k = {96, 4, 32, 2}, .v = {96, 4, 96, 2}});
  REQUIRE(narrow != nullptr);
  CHECK(find_prefill_variant(*narrow) == nullptr);
  CHECK_THAT(std::string(check_prefill_shape(variant(), *narrow, good_launch().shape).message()),
             Contains("does not go with"));
}

TEST_CASE("Prefills that cannot be are refused by name", "[runtime]") {
  const auto refusal = [](auto change) {
    PrefillParams p = good();
    change(p);
    const Status status = check_prefill(variant(), int2(), good_launch(), p);
    CHECK_FALSE(status.ok());
    return std::string(status.message());
  };
  using Catch::Contains;
  REQUIRE(std::string(check_prefill(variant(), int2(), good_launch(), good()).message()) == "");
  CHECK_THAT(refusal([](PrefillParams& p) { p.cache.batch = 3; }), Contains("batch of 3"));
  CHECK_THAT(refusal([](PrefillParams& p) { p.num_q_heads = 4; }), Contains("the plan is for up to 2, 8 and 2"));
  CHECK_THAT(refusal([](PrefillParams& p) { p.softmax_scale = 0.0f; }), Contains("softmax_scale"));
  CHECK_THAT(refusal([](PrefillParams& p) { p.sliding_window = -1; }), Contains("sliding_window is -1"));
  CHECK_THAT(refusal([](PrefillParams& p) { p.cache.page_shift = 3; }), Contains("prefill: pages of 2^3"));
  CHECK_THAT(refusal([](PrefillParams& p) { p.num_tokens = -1; }), Contains("num_tokens is -1"));
  CHECK_THAT(refusal([](PrefillParams& p) { p.cache.page_table = nullptr; }), Contains("page_table"));
  CHECK_THAT(refusal([](PrefillParams& p) { p.cache.windows.recent_tokens = 9; }), Contains("need ring_slots"));
  CHECK_THAT(refusal([](PrefillParams& p) { p.q_indptr = nullptr; }), Contains("q_indptr"));
  CHECK_THAT(refusal([](PrefillParams& p) { p.q = nullptr; }), Contains("q must not be null"));
  CHECK_THAT(refusal([](PrefillParams& p) { p.k_stride = 128; }), Contains("256 elements apart, found 128"));
  CHECK_THAT(refusal([](PrefillParams& p) { p.v_stride = 260; }), Contains("v must not"));
  CHECK_THAT(refusal([](PrefillParams& p) { p.out_stride = 512; }), Contains("out must not"));
  CHECK_THAT(refusal([](PrefillParams& p) { p.workspace = nullptr; }), Contains("workspace of 1048576 bytes"));
}

TEST_CASE("Slabs hold as many work_tiles as the workspace, one at least", "[runtime]") {
  PrefillLaunch launch;
  launch.shape = {.batch = 3, .num_q_heads = 8, .num_kv_heads = 2, .max_queries = 17, .max_keys = 129};
  const auto slab_within = [&](std::int64_t bytes) {
    launch.shape.workspace_bytes = bytes;
    take_slab(launch, 64, 32, 1000);
    return launch.slab.work_tiles;
  };
  CHECK(slab_within(0) == 6);  // as much as all blocks use
  CHECK(launch.slab.tiles == 5);
  CHECK(launch.slab.row_blocks == 2);  // 17 tokens of four heads
  CHECK(launch.workspace_bytes == 30000);
  CHECK(slab_within(14999) == 2);
  CHECK(launch.workspace_bytes == 10000);
  CHECK(slab_within(15000) == 3);
  CHECK(slab_within(1) == 1);
  CHECK(slab_within(1'000'000) == 6);
  launch.shape.batch = 0;
  CHECK(slab_within(0) == 0);
  CHECK(launch.workspace_bytes == 0);
}
