#include <kvq/dump/number_check.h>

#include <catch2/catch.hpp>

#include <cstdint>
#include <vector>

using namespace kvq;

namespace {

template <typename Word>
NumberCheck checked(DType type, const std::vector<Word>& words, std::size_t block_words) {
  NumberCheck check(type);
  const auto bytes = std::as_bytes(std::span(words));
  for (std::size_t i = 0; i < bytes.size(); i += block_words * sizeof(Word))
    check.add(bytes.subspan(i, std::min(block_words * sizeof(Word), bytes.size() - i)));
  return check;
}

/// Checks which patterns of a type count as finite.
template <typename Word>
void check_type(DType type, Word one, const std::vector<Word>& finite, const std::vector<Word>& bad) {
  for (const std::size_t block : {1u, 7u, 256u, 10'000u}) {
    for (const std::size_t where : {0u, 255u, 256u, 511u, 800u, 999u}) {
      std::vector<Word> words(1000, one);
      for (const Word word : finite) {
        words[where] = word;
        CHECK_FALSE(checked(type, words, block).first_bad());
      }
      for (const Word word : bad) {
        words[where] = words.back() = word;
        CHECK(checked(type, words, block).first_bad() == where);
      }
    }
  }
}

}  // namespace

TEST_CASE("NaN and infinity are found by their bits, wherever they stand", "[dump]") {
  check_type<std::uint32_t>(DType::f32, 0x3f800000, {0x7f7fffff, 0xff7fffff, 1, 0x80000000},
                            {0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001});
  check_type<std::uint16_t>(DType::f16, 0x3c00, {0x7bff, 0xfbff, 1, 0x8000}, {0x7c00, 0xfc00, 0x7e00, 0x7c01, 0xffff});
  check_type<std::uint16_t>(DType::bf16, 0x3f80, {0x7f7f, 0xff7f, 0x7c00, 1, 0x8000},
                            {0x7f80, 0xff80, 0x7fc0, 0x7f81, 0xffff});
}

TEST_CASE("Magnitudes at or above a limit are found", "[dump]") {
  const auto first_bad = []<typename Word>(DType type, const std::vector<Word>& words) {
    NumberCheck check(type, 1e14f);  // 0x56b5e621
    check.add(std::as_bytes(std::span(words)));
    return check.first_bad();
  };
  CHECK_FALSE(first_bad(DType::f32, std::vector<std::uint32_t>{0x56b5e620, 0xd6b5e620}));
  CHECK(first_bad(DType::f32, std::vector<std::uint32_t>{1, 0x56b5e621}) == 1);
  CHECK(first_bad(DType::f32, std::vector<std::uint32_t>{1, 2, 0xd6b5e621, 0x7f800000}) == 2);
  CHECK_FALSE(first_bad(DType::bf16, std::vector<std::uint16_t>{0x56b5, 0xd6b5}));
  CHECK(first_bad(DType::bf16, std::vector<std::uint16_t>{0xd6b6, 0x7f80}) == 0);
  CHECK_FALSE(first_bad(DType::f16, std::vector<std::uint16_t>{0x7bff, 0xfbff}));
  CHECK(first_bad(DType::f16, std::vector<std::uint16_t>{1, 0xfc00}) == 1);
}

TEST_CASE("All zeros means positive and negative zeros only", "[dump]") {
  std::vector<std::uint16_t> words(1000, 0x8000);
  words[3] = 0;
  CHECK(checked(DType::bf16, words, 64).all_zero());
  words[999] = 0x8001;
  CHECK_FALSE(checked(DType::bf16, words, 64).all_zero());
  CHECK(NumberCheck(DType::f32).all_zero());
}
