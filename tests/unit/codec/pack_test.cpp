#include <kvq/codec/codec.h>

#include "support/packing_reference.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

using namespace kvq;

TEST_CASE("Codes are a little-endian bit stream, padded with zero bits to a byte", "[codec]") {
  std::vector<std::byte> bytes(2, std::byte{0xff});
  pack_codes(std::vector<std::uint8_t>{5, 2, 7}, 3, bytes);  // 101, 010, 111: bits 0..8
  CHECK(bytes == std::vector<std::byte>{std::byte{0xd5}, std::byte{0x01}});
}

TEST_CASE("Every width and length packs as the bit stream says and unpacks to the same codes", "[codec]") {
  test::Random random(2);
  for (int bits = 1; bits <= 8; ++bits)
    for (std::size_t length = 0; length <= 67; ++length) {
      std::vector<std::uint8_t> codes(length), back(length, 0xee);
      for (auto& code : codes) code = static_cast<std::uint8_t>(random.bits() & ((1u << bits) - 1u));
      const std::vector<std::uint8_t> expected = test::reference_stream(codes, bits);
      std::vector<std::byte> bytes(expected.size(), std::byte{0xa5});  // bytes from before must not remain
      pack_codes(codes, bits, bytes);
      INFO("width " << bits << ", length " << length);
      CHECK(std::equal(bytes.begin(), bytes.end(), expected.begin(),
                       [](std::byte a, std::uint8_t b) { return static_cast<std::uint8_t>(a) == b; }));
      unpack_codes(bytes, bits, back);
      CHECK(back == codes);
    }
}

TEST_CASE("Numbers follow the codes: all scales, then all minima", "[codec]") {
  const UniformCoder coder{.bits = 4, .group_size = 2, .scale_type = ScaleType::bf16};
  std::vector<std::byte> bytes(static_cast<std::size_t>(row_bytes(coder, 4)));
  REQUIRE(bytes.size() == 10);
  pack_row(coder, std::vector<std::uint8_t>{1, 2, 3, 4}, std::vector<float>{1.0f, 2.0f, -1.0f, -2.0f}, bytes);
  const unsigned expected[] = {0x21, 0x43, 0x80, 0x3f, 0x00, 0x40, 0x80, 0xbf, 0x00, 0xc0};
  for (std::size_t i = 0; i < 10; ++i) CHECK(static_cast<unsigned>(bytes[i]) == expected[i]);
}
