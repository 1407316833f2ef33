#include <kvq/runtime/kernels/quantize_write/variant.h>

#include <catch2/catch.hpp>

#include <set>
#include <string>

using namespace kvq;

namespace {

/// Parameters that pass; the pointers are never followed.
WriteParams good(const WriteVariant& variant) {
  alignas(16) static std::byte memory[16];
  static std::int64_t slots[1];
  WriteParams p;
  p.num_tokens = 5, p.num_kv_heads = 2;
  p.k = {memory, 2 * variant.k.head_dim, nullptr, nullptr, false, 1,
         variant.k.numbers == 2 ? ScaleRule::minmax : ScaleRule::norm};
  p.v = {memory, 2 * variant.v.head_dim, nullptr, nullptr, false, 1,
         variant.v.numbers == 2 ? ScaleRule::minmax : ScaleRule::norm};
  p.slot_mapping = slots, p.pages = memory;
  p.page_stride = PageLayout{variant.k, variant.v, 2, 64}.page_bytes();
  return p;
}

}  // namespace

TEST_CASE("Write variants have names of their own and take sound parameters", "[runtime]") {
  std::set<std::string> names;
  for (const WriteVariant* row : write_variants()) {
    CHECK(names.insert(row->name).second);
    CHECK(std::string(check_write(*row, good(*row)).message()) == "");
  }
  CHECK(names.size() >= 5);
}

TEST_CASE("Writes that cannot be are refused by name", "[runtime]") {
  const WriteVariant& variant = *write_variants().front();
  REQUIRE(variant.k.numbers == 2);
  const auto refusal = [&](auto change) {
    WriteParams p = good(variant);
    change(p);
    const Status status = check_write(variant, p);
    CHECK_FALSE(status.ok());
    return std::string(status.message());
  };
  using Catch::Contains;
  CHECK_THAT(refusal([](WriteParams& p) { p.num_tokens = -1; }), Contains("-1 tokens"));
  CHECK_THAT(refusal([](WriteParams& p) { p.num_kv_heads = 0; }), Contains("0 KV heads"));
  CHECK_THAT(refusal([](WriteParams& p) { p.page_shift = 3; }), Contains("16, 32 and 64"));
  CHECK_THAT(refusal([](WriteParams& p) { p.page_stride -= 16; }), Contains("bytes apart"));
  CHECK_THAT(refusal([](WriteParams& p) { p.slot_mapping = nullptr; }), Contains("pages"));
  CHECK_THAT(refusal([](WriteParams& p) { p.k.x = nullptr; }), Contains("k: rows"));
  CHECK_THAT(refusal([](WriteParams& p) { p.v.token_stride = 100; }), Contains("v: rows"));
  CHECK_THAT(refusal([](WriteParams& p) { p.k.order = 3; }), Contains("order of 3"));
  CHECK_THAT(refusal([](WriteParams& p) { p.k.order = 256; }), Contains("order of 256"));
  CHECK_THAT(refusal([](WriteParams& p) { p.v.rule = ScaleRule::norm; }), Contains("norm does not go with affine"));
}
