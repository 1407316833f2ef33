#include <kvq/dump/number_check.h>

#include <kvq/core/error.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kvq {
namespace {

/// The exponent's bits; a number whose exponent is all ones is NaN or infinity.
template <typename Word>
Word exponent_mask(DType type) {
  if constexpr (sizeof(Word) == 4) return 0x7f800000u;
  return type == DType::f16 ? Word{0x7c00} : Word{0x7f80};
}

template <typename Word>
Word load(const std::byte* data, std::size_t index) {
  Word word;
  std::memcpy(&word, data + index * sizeof(Word), sizeof(Word));
  return word;
}

struct Verdict {
  bool bad = false;
  bool any_nonzero = false;
};

/// No early exit and a short fixed stretch, so that compilers make vector code of it.
template <typename Word, std::size_t kCount>
Verdict judge(const std::byte* data, Word mask) {
  Word bad = 0, bits = 0;
  for (std::size_t i = 0; i < kCount; ++i) {
    const Word word = load<Word>(data, i);
    bad = static_cast<Word>(bad | ((word & mask) == mask));
    bits = static_cast<Word>(bits | word);
  }
  return {bad != 0, static_cast<Word>(bits << 1) != 0};  // without the sign: -0 is zero
}

template <typename Word>
std::optional<std::size_t> find_bad(const std::byte* data, std::size_t count, Word mask) {
  for (std::size_t i = 0; i < count; ++i)
    if ((load<Word>(data, i) & mask) == mask) return i;
  return std::nullopt;
}

template <typename Word>
Verdict judge_all(std::span<const std::byte> block, Word mask) {
  constexpr std::size_t kStretch = 256;
  const std::size_t count = block.size() / sizeof(Word);
  Verdict all;
  const auto merge = [&](Verdict verdict) {
    all.bad |= verdict.bad;
    all.any_nonzero |= verdict.any_nonzero;
  };
  std::size_t i = 0;
  for (; i + kStretch <= count; i += kStretch) merge(judge<Word, kStretch>(block.data() + i * sizeof(Word), mask));
  for (; i < count; ++i) merge(judge<Word, 1>(block.data() + i * sizeof(Word), mask));
  return all;
}

}  // namespace

void NumberCheck::add(std::span<const std::byte> block) {
  const auto check = [&]<typename Word>(std::type_identity<Word>) {
    const Word mask = exponent_mask<Word>(type_);
    const Verdict verdict = judge_all<Word>(block, mask);
    any_nonzero_ |= verdict.any_nonzero;
    if (verdict.bad && !first_bad_)
      first_bad_ = count_ + *find_bad<Word>(block.data(), block.size() / sizeof(Word), mask);
    count_ += block.size() / sizeof(Word);
  };
  KVQ_ASSERT(type_ == DType::f32 || type_ == DType::f16 || type_ == DType::bf16);
  if (type_ == DType::f32) {
    check(std::type_identity<std::uint32_t>{});
  } else {
    check(std::type_identity<std::uint16_t>{});
  }
}

}  // namespace kvq
