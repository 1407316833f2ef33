#include <kvq/runtime/checks.h>
#include <kvq/runtime/kernels/decode/variant.h>

#include <catch2/catch.hpp>

#include <set>
#include <string>

using namespace kvq;

namespace {

const TileSide kInt2{128, 2, 128, 2}, kExact{128, 16, 128, 0};

const DecodeVariant& int2() {
  const DecodeVariant* row = find_decode_variant({.k = kInt2, .v = kInt2, .heads = 4});
  REQUIRE(row != nullptr);
  return *row;
}

/// Valid parameters; no test follows the pointers.
DecodeParams good() {
  alignas(256) static std::byte memory[256];
  static std::int32_t numbers[4];
  DecodeParams p;
  p.cache.batch = 2, p.num_q_heads = 8, p.cache.num_kv_heads = 2, p.softmax_scale = 0.1f;
  p.q = memory, p.out = memory, p.q_stride = p.out_stride = 8 * 128;
  p.cache.seq_lens = p.cache.page_table = p.cache.sink_slots = p.cache.ring_slots = numbers;
  p.cache.page_table_stride = 4;
  p.cache.pages = p.cache.sinks = p.cache.rings = memory, p.cache.page_stride = 2 * 64 * 72;
  p.workspace = memory;
  p.cache.windows = {64, 256};
  p.cache.sink_layout = {2, kExact, kExact, kInt2, 64}, p.cache.ring_layout = {2, kExact, kExact, kInt2, 272};
  return p;
}

}  // namespace

TEST_CASE("Rows of the table have names of their own and fit the layout", "[runtime]") {
  std::set<std::string> names;
  for (const DecodeVariant* row : decode_variants()) {
    CHECK(names.insert(row->name).second);
    CHECK(find_decode_variant({row->k, row->v, row->k_bfloat, row->v_bfloat, row->max_rows, row->bf16}) == row);
  }
  CHECK(names.size() >= 5);
}

TEST_CASE("A variant has the fewest passes for the heads, and the right numbers", "[runtime]") {
  CHECK(find_decode_variant({.k = kInt2, .v = kInt2, .heads = 1}) == &int2());
  const DecodeVariant* many = find_decode_variant({.k = kInt2, .v = kInt2, .heads = 17});
  REQUIRE(many);
  CHECK(many->max_rows == 16);
  CHECK(decode_work_tiles(*many, 3, 2, 17, 1) == 3 * 2 * 2);
  CHECK(decode_work_tiles(*many, 3, 2, 17, 5) == 3 * 2 * 5 * 2);
  CHECK(find_decode_variant({.k = kInt2, .v = kInt2, .k_bfloat = true, .heads = 4}) == nullptr);
  CHECK(find_decode_variant({.k = {128, 3, 128, 2}, .v = kInt2, .heads = 4}) == nullptr);
}

TEST_CASE("Parameters that cannot be are refused by name", "[runtime]") {
  const auto refusal = [](auto change) {
    DecodeParams p = good();
    change(p);
    const Status status = check_decode(int2(), p);
    CHECK_FALSE(status.ok());
    return std::string(status.message());
  };
  using Catch::Contains;
  REQUIRE(std::string(check_decode(int2(), good()).message()) == "");
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.batch = -1; }), Contains("batch is -1"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.num_q_heads = 7; }), Contains("7 query heads and 2 KV heads"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.num_q_heads = p.cache.num_kv_heads = 32768; }),
             Contains("decode: 32768 KV heads; supported are at most 32767"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.softmax_scale = 0.0f; }), Contains("softmax_scale"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.page_shift = 8; }), Contains("16, 32, 64 and 128"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.windows.recent_tokens = -1; }), Contains("recent_tokens"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.page_table_stride = 0; }), Contains("page_table_stride is 0"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.q = nullptr; }), Contains("must not be null"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.q_stride = 1; }), Contains("1024 elements apart"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.out_stride = 1000; }), Contains("out_stride is 1000, expected 1024"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.batch = 1 << 29; }),
             Contains("536870912 sequences of up to 1 tokens of 8 query heads"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.logit_softcap = -1.0f; }), Contains("logit_softcap must be 0 or"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.logit_softcap = __builtin_nanf(""); }), Contains("logit_softcap must be"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.max_new_tokens = 17; }),
             Contains("max_new_tokens is 17, expected 1 to 16"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.max_new_tokens = 2; }), Contains("need q_indptr"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.token_masks = reinterpret_cast<const std::uint32_t*>(16); }),
             Contains("need q_indptr"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.first = reinterpret_cast<const std::int32_t*>(2); }),
             Contains("must be aligned to 4 bytes"));
  CHECK_THAT(refusal([](DecodeParams& p) {
               p.q_indptr = reinterpret_cast<const std::int32_t*>(16);
               p.num_tokens = -1;
             }),
             Contains("num_tokens is -1"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.workspace = static_cast<std::byte*>(p.workspace) + 16; }),
             Contains("workspace must be aligned to 256 bytes"));
  const auto dense = [](DeviceRotation& rotation, const std::byte* fragments) {
    static const float matrix = 1.0f;
    rotation.matrix = &matrix, rotation.fragments = fragments;
  };
  CHECK_THAT(refusal([&](DecodeParams& p) { dense(p.cache.rotation_k, nullptr); }),
             Contains("k: a dense rotation needs"));
  CHECK_THAT(refusal([&](DecodeParams& p) { dense(p.cache.rotation_v, p.cache.pages + 8); }),
             Contains("v: a dense rotation"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.page_stride -= 16; }), Contains("9216 bytes apart, found 9200"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.pages = static_cast<const std::byte*>(p.cache.pages) + 8; }),
             Contains("aligned"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.sinks = nullptr; }), Contains("sinks must not be null"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.rings = nullptr; }), Contains("rings must not be null"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.rings += 8; }), Contains("rings must not be null, aligned to 16"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.sink_slots = nullptr; }),
             Contains("64 sink tokens need sink_slots"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.ring_slots = nullptr; }),
             Contains("256 recent tokens need ring_slots"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.sink_layout.coded_v.bits = 4; }), Contains("the layout of sinks"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.ring_layout.num_kv_heads = 3; }), Contains("the layout of rings"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.ring_layout.rows = 240; }),
             Contains("240 rows of rings do not hold 256 tokens in tiles of 16"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.sink_layout.rows = 48; }),
             Contains("48 rows of sinks do not hold 64"));
  CHECK_THAT(refusal([](DecodeParams& p) { p.cache.ring_layout.rows = 264; }), Contains("264 rows of rings"));
}

TEST_CASE("Centroids that an index cannot count, or that are not there, are refused", "[runtime]") {
  alignas(16) const float centroids[4] = {};
  const TileSide plain{128, 4, 128, 2}, indexed{.head_dim = 128, .bits = 4, .index_bytes = 1};
  PagedCacheView cache;
  CHECK(check_centroids("decode", cache, plain, plain).ok());
  const auto refusal = [&](const float* rotated, int count) {
    cache.code_v.rotated_centroids = rotated, cache.code_v.num_centroids = count;
    return std::string(check_centroids("decode", cache, plain, indexed).message());
  };
  CHECK(refusal(centroids, 1) == "");
  CHECK(refusal(centroids, 256) == "");
  CHECK(refusal(centroids, 0) == "decode: v: 0 centroids, expected 1 to 256");
  CHECK(refusal(centroids, 257) == "decode: v: 257 centroids, expected 1 to 256");
  for (const float* at : {static_cast<const float*>(nullptr), centroids + 1})
    CHECK_THAT(refusal(at, 1),
               Catch::Matchers::Contains("v: rows with centroids need `rotated_centroids`, aligned to 16 bytes"));
}
