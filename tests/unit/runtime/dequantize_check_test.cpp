#include <kvq/runtime/kernels/dequantize/variant.h>

#include <catch2/catch.hpp>

#include <set>
#include <string>

using namespace kvq;

namespace {

const TileSide kInt2{128, 2, 128, 2}, kExact{128, 16, 128, 0};

const DequantizeVariant& int2() {
  const DequantizeVariant* row = find_dequantize_variant({.k = kInt2, .v = kInt2});
  REQUIRE(row != nullptr);
  return *row;
}

/// Valid parameters; no test follows the pointers.
DequantizeParams good() {
  alignas(16) static std::byte memory[16];
  static std::int32_t numbers[4];
  DequantizeParams p;
  PagedCacheView& c = p.cache;
  c.batch = 2, c.num_kv_heads = 2;
  c.seq_lens = c.page_table = c.sink_slots = c.ring_slots = numbers;
  c.pages = c.sinks = c.rings = memory, c.page_stride = 2 * 64 * 72, c.page_table_stride = 4;
  c.windows = {64, 256};
  c.sink_layout = {2, kExact, kExact, kInt2, 64}, c.ring_layout = {2, kExact, kExact, kInt2, 272};
  p.out_indptr = numbers;
  p.k = p.v = memory, p.k_stride = p.v_stride = 2 * 128;
  return p;
}

}  // namespace

TEST_CASE("Rows of dequantize have names of their own and are found", "[runtime]") {
  std::set<std::string> names;
  for (const DequantizeVariant* row : dequantize_variants()) {
    CHECK(names.insert(row->name).second);
    CHECK(find_dequantize_variant({row->k, row->v, row->k_bfloat, row->v_bfloat, row->bf16}) == row);
    CHECK((row->to_tiles != nullptr) == (row->k.head_dim % 64 == 0));
  }
  CHECK(names.size() >= 5);
  CHECK(find_dequantize_variant({.k = kInt2, .v = kInt2, .k_bfloat = true}) == nullptr);
  CHECK(find_dequantize_variant({.k = {128, 3, 128, 2}, .v = kInt2}) == nullptr);
}

TEST_CASE("Caches that cannot be read are refused by name", "[runtime]") {
  const auto refusal = [](auto change) {
    DequantizeParams p = good();
    change(p, p.cache);
    const Status status = check_dequantize(int2(), p);
    CHECK_FALSE(status.ok());
    return std::string(status.message());
  };
  using P = DequantizeParams;
  using C = PagedCacheView;
  using Catch::Contains;
  CHECK_THAT(refusal([](P&, C& c) { c.page_table_stride = 0; }), Contains("page_table_stride is 0"));
  REQUIRE(std::string(check_dequantize(int2(), good()).message()) == "");
  CHECK_THAT(refusal([](P&, C& c) { c.batch = -1; }), Contains("batch is -1"));
  CHECK_THAT(refusal([](P&, C& c) { c.num_kv_heads = 0; }), Contains("0 KV heads"));
  CHECK_THAT(refusal([](P&, C& c) { c.num_kv_heads = 32768; }), Contains("dequantize: 32768 KV heads; supported"));
  CHECK_THAT(refusal([](P&, C& c) { c.page_shift = 8; }), Contains("16, 32, 64 and 128"));
  CHECK_THAT(refusal([](P&, C& c) { c.windows.recent_tokens = -1; }), Contains("recent_tokens"));
  CHECK_THAT(refusal([](P&, C& c) { c.rotation_k.order = 48; }), Contains("k: a Hadamard order of 48"));
  CHECK_THAT(refusal([](P&, C& c) { c.rotation_v.order = 256; }), Contains("v: a Hadamard order of 256"));
  CHECK_THAT(refusal([](P&, C& c) { c.seq_lens = nullptr; }), Contains("seq_lens"));
  CHECK_THAT(refusal([](P&, C& c) { c.page_stride -= 16; }), Contains("9216 bytes apart, found 9200"));
  CHECK_THAT(refusal([](P&, C& c) { c.sinks = nullptr; }), Contains("sinks must not be null"));
  CHECK_THAT(refusal([](P&, C& c) { c.rings = nullptr; }), Contains("rings must not be null"));
  CHECK_THAT(refusal([](P&, C& c) { c.rings += 8; }), Contains("rings must not be null, aligned to 16"));
  CHECK_THAT(refusal([](P&, C& c) { c.sink_slots = nullptr; }), Contains("64 sink tokens need sink_slots"));
  CHECK_THAT(refusal([](P&, C& c) { c.ring_slots = nullptr; }), Contains("256 recent tokens need ring_slots"));
  CHECK_THAT(refusal([](P&, C& c) { c.sink_layout.coded_v.bits = 4; }), Contains("the layout of sinks"));
  CHECK_THAT(refusal([](P&, C& c) { c.ring_layout.num_kv_heads = 3; }), Contains("the layout of rings"));
  CHECK_THAT(refusal([](P&, C& c) { c.ring_layout.rows = 240; }),
             Contains("240 rows of rings do not hold 256 tokens in tiles of 16"));
  CHECK_THAT(refusal([](P&, C& c) { c.sink_layout.rows = 48; }), Contains("48 rows of sinks do not hold 64"));
  CHECK_THAT(refusal([](P&, C& c) { c.ring_layout.rows = 264; }), Contains("264 rows of rings"));
  CHECK_THAT(refusal([](P& p, C&) { p.num_rows = -1; }), Contains("num_rows is -1"));
  CHECK_THAT(refusal([](P& p, C&) { p.out_indptr = nullptr; }), Contains("out_indptr"));
  CHECK_THAT(refusal([](P& p, C&) { p.k = nullptr; }), Contains("must not be null"));
  CHECK_THAT(refusal([](P& p, C&) { p.v_stride = 8; }), Contains("256 elements apart, found 256 and 8"));
}

TEST_CASE("Linear rows without their matrices are refused", "[runtime]") {
  const TileSide rows{.head_dim = 128, .bits = 0, .group_size = 128, .numbers = 1, .row_words = 8};
  const DequantizeVariant linear = bits_dequantize({rows, rows}, {}, true);
  CHECK(linear.tuned);
  CHECK(linear.to_tiles != nullptr);
  DequantizeParams p = good();
  p.cache.sink_layout.coded_v = p.cache.ring_layout.coded_v = rows;
  p.cache.rotation_k.row_matrices = p.cache.rotation_v.row_matrices = p.cache.pages;
  CHECK(std::string(check_dequantize(linear, p).message()) == "");
  for (DeviceRotation* rotation : {&p.cache.rotation_k, &p.cache.rotation_v})
    for (const std::byte* wrong : {static_cast<const std::byte*>(nullptr), p.cache.pages + 8}) {
      rotation->row_matrices = wrong;
      CHECK_THAT(check_dequantize(linear, p).message(),
                 Catch::Contains("rows in bit tiles: their matrices must not be null"));
      rotation->row_matrices = p.cache.pages;
    }
}
