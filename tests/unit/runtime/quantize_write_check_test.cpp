#include <kvq/runtime/kernels/quantize_write/variant.h>

#include <catch2/catch.hpp>

#include <set>
#include <string>

using namespace kvq;
using Catch::Contains;

namespace {

/// Valid parameters; no test follows the pointers.
WriteParams good(const WriteVariant& variant) {
  alignas(16) static std::byte memory[16];
  static std::int64_t slots[1];
  WriteParams p;
  p.num_tokens = 5, p.num_kv_heads = 2;
  p.k.x = p.v.x = memory;
  p.k.token_stride = 2 * variant.k.head_dim, p.v.token_stride = 2 * variant.v.head_dim;
  p.k.rule = variant.k.numbers == 2 ? ScaleRule::minmax : ScaleRule::norm;
  p.v.rule = variant.v.numbers == 2 ? ScaleRule::minmax : ScaleRule::norm;
  for (const auto& [side, tile] : {std::pair{&p.k, &variant.k}, std::pair{&p.v, &variant.v}})
    if (tile->index_bytes > 0)
      side->code.num_centroids = 2, side->code.centroids = reinterpret_cast<const float*>(memory);
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

TEST_CASE("Windows must be those of the variant", "[runtime]") {
  static std::int64_t rows[1];
  for (const WriteVariant* variant : write_variants()) {
    CAPTURE(variant->name);
    WriteParams p = good(*variant);
    p.window_mapping = rows;
    const auto message = [&] { return std::string(check_write(*variant, p).message()); };
    CHECK_THAT(message(), Contains("the layout of sinks"));
    const TileSide k{variant->k.head_dim, 16, 0, 0}, v{variant->v.head_dim, 16, 0, 0};
    p.sink_layout = {2, k, v, variant->v, 16};
    CHECK_THAT(message(), Contains("sinks must not be null"));
    p.sinks = p.pages;
    CHECK_THAT(message(), Contains("the layout of rings"));
    p.ring_layout = {2, k, v, variant->v, 48};
    CHECK_THAT(message(), Contains("rings must not be null"));
    p.rings = p.pages;
    CHECK(message() == "");
    p.ring_layout.rows = 40;
    CHECK_THAT(message(), Contains("40 rows of rings"));
    p.ring_layout.rows = 0, p.rings = nullptr;  // without recent tokens
    CHECK(message() == "");
    p.ring_layout.coded_v.bits = variant->v.bits == 4 ? 2 : 4;
    CHECK_THAT(message(), Contains("the layout of rings"));
    p.window_mapping = nullptr;
    CHECK(message() == "");
  }
}

TEST_CASE("The kernels for coded rows have two scale rules", "[runtime]") {
  const TileSide side{.head_dim = 128, .bits = 0, .group_size = 128, .numbers = 1, .row_words = 12, .table_bits = 3};
  const CodedRows rows{.codebook_bits = 3};
  const WriteVariant both = coded_write({side, side, false, false}, rows, rows, true),
                     values = coded_write({side, side, false, false}, {}, rows, true);
  WriteParams p = good(both);
  const HeadRows heads[1] = {};
  const float tables[1] = {};
  for (WriteSide* of : {&p.k, &p.v}) of->code.heads = heads, of->code.tables = tables, of->rule = ScaleRule::rms;
  CHECK(std::string(check_write(both, p).message()) == "");
  p.k.rule = ScaleRule::least_squares;
  CHECK_THAT(std::string(check_write(both, p).message()),
             Contains("k: scale rule least_squares; the kernels for codebook and trellis codes support norm and rms"));
  CHECK(check_write(values, p).ok());
  p.v.rule = ScaleRule::absmax;
  CHECK_THAT(std::string(check_write(values, p).message()), Contains("v: scale rule absmax"));
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
  CHECK_THAT(refusal([](WriteParams& p) { p.num_tokens = -1; }), Contains("-1 tokens"));
  CHECK_THAT(refusal([](WriteParams& p) { p.num_kv_heads = 0; }), Contains("0 KV heads"));
  CHECK_THAT(refusal([](WriteParams& p) { p.num_kv_heads = 32768; }),
             Contains("quantize_write: 32768 KV heads; supported are at most 32767"));
  CHECK_THAT(refusal([](WriteParams& p) { p.page_shift = 3; }), Contains("16, 32, 64 and 128"));
  CHECK_THAT(refusal([](WriteParams& p) { p.page_stride -= 16; }), Contains("bytes apart"));
  CHECK_THAT(refusal([](WriteParams& p) { p.page_stride = std::int64_t{1} << 32; }),
             Contains("pages 4294967296 bytes apart; supported are fewer than 2^32"));
  CHECK_THAT(refusal([](WriteParams& p) { p.slot_mapping = nullptr; }), Contains("slot_mapping"));
  CHECK_THAT(refusal([](WriteParams& p) { p.k.x = nullptr; }), Contains("k: rows"));
  CHECK_THAT(refusal([](WriteParams& p) { p.v.token_stride = 100; }), Contains("v: rows"));
  CHECK_THAT(refusal([](WriteParams& p) { p.k.token_stride = std::int64_t{1} << 32; }),
             Contains("k: tokens 4294967296 elements apart; supported are fewer than 2^32"));
  CHECK_THAT(refusal([](WriteParams& p) { p.k.order = 3; }), Contains("order of 3"));
  CHECK_THAT(refusal([](WriteParams& p) { p.k.order = 256; }), Contains("order of 256"));
  CHECK_THAT(refusal([](WriteParams& p) { p.v.rule = ScaleRule::norm; }), Contains("norm does not go with affine"));

  alignas(16) static const std::byte rotation[32] = {};
  alignas(16) static const float center[8] = {};
  const auto dense = [&](WriteParams& p) { p.k.rotation = rotation, p.k.rotation_stride = 4 * 128 * 128; };
  CHECK_THAT(refusal([&](WriteParams& p) { dense(p), p.k.rotation += 8; }),
             Contains("packed rotations must be aligned"));
  CHECK_THAT(refusal([&](WriteParams& p) { dense(p), p.k.rotation_stride = 32768; }),
             Contains("65536 bytes apart, or one for all heads, found 32768"));
  CHECK_THAT(refusal([&](WriteParams& p) { dense(p), p.k.order = 2; }), Contains("beside Hadamard blocks of order 2"));
  CHECK_THAT(refusal([&](WriteParams& p) { p.v.center = center + 1; }), Contains("v: centers must be aligned"));
  WriteParams far = good(variant);
  far.page_stride = (std::int64_t{1} << 32) - 16, far.v.token_stride = (std::int64_t{1} << 32) - 8;
  CHECK(check_write(variant, far).ok());
  WriteParams sound = good(variant);
  dense(sound);
  CHECK(check_write(variant, sound).ok());
  sound.k.rotation_stride = 0;
  CHECK(check_write(variant, sound).ok());
  static const std::int32_t ranks[2] = {};
  for (const WriteVariant* row : write_variants()) {
    WriteParams p = good(*row);
    if (row->k.index_bytes > 0) {
      WriteParams other = p;
      other.k.code.centroids = reinterpret_cast<const float*>(reinterpret_cast<const char*>(other.k.x) + 4);
      CHECK_THAT(check_write(*row, other).message(), Contains("k: centroids must be aligned to 16 bytes"));
      other = p;
      other.k.code.num_centroids = 0;
      CHECK_THAT(check_write(*row, other).message(), Contains("k: 0 centroids, and 1 bytes of their index"));
      other = p;
      other.k.center = p.k.code.centroids;
      CHECK_THAT(check_write(*row, other).message(), Contains("centroids and centers; expected one of both"));
    }
    p.k.clip_ranks = ranks;
    const Status status = check_write(*row, p);
    CHECK(status.ok() == (row->k.numbers == 2));
    if (!status.ok()) CHECK_THAT(status.message(), Contains("a clip goes with scale rule minmax, found norm"));
  }
}
