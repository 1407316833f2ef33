#include <kvq/dump/number_check.h>

#include <kvq/core/error.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace kvq {
namespace {

/// Mask without the sign bit. The remaining bits of floats are ordered like their magnitudes; infinity, then NaN, come
/// after all finite numbers.
template <typename Word>
constexpr Word kMagnitude = std::numeric_limits<Word>::max() >> 1;

/// The bits of the smallest magnitude that is refused.
template <typename Word>
Word first_refused(DType type, float limit) {
  const auto bits = std::bit_cast<std::uint32_t>(limit);
  if constexpr (sizeof(Word) == 4) return bits;
  if (type == DType::bf16) return static_cast<Word>((bits + 0xffffu) >> 16);
  KVQ_ASSERT(limit > 65504.0f);  // the largest float16
  return Word{0x7c00};
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

/// The loop has a short fixed length and no early exit, so that compilers vectorize it.
template <typename Word, std::size_t kCount>
Verdict judge(const std::byte* data, Word refused) {
  Word bad = 0, bits = 0;
  for (std::size_t i = 0; i < kCount; ++i) {
    const Word word = load<Word>(data, i);
    bad = static_cast<Word>(bad | ((word & kMagnitude<Word>) >= refused));
    bits = static_cast<Word>(bits | word);
  }
  return {bad != 0, static_cast<Word>(bits << 1) != 0};  // without the sign: -0 is zero
}

template <typename Word>
std::optional<std::size_t> find_bad(const std::byte* data, std::size_t count, Word refused) {
  for (std::size_t i = 0; i < count; ++i)
    if ((load<Word>(data, i) & kMagnitude<Word>) >= refused) return i;
  return std::nullopt;
}

template <typename Word>
Verdict judge_all(std::span<const std::byte> block, Word refused) {
  constexpr std::size_t kStretch = 256;
  const std::size_t count = block.size() / sizeof(Word);
  Verdict all;
  const auto merge = [&](Verdict verdict) {
    all.bad |= verdict.bad;
    all.any_nonzero |= verdict.any_nonzero;
  };
  std::size_t i = 0;
  for (; i + kStretch <= count; i += kStretch) merge(judge<Word, kStretch>(block.data() + i * sizeof(Word), refused));
  for (; i < count; ++i) merge(judge<Word, 1>(block.data() + i * sizeof(Word), refused));
  return all;
}

}  // namespace

void NumberCheck::add(std::span<const std::byte> block) {
  const auto check = [&]<typename Word>(std::type_identity<Word>) {
    const Word refused = first_refused<Word>(type_, limit_);
    const Verdict verdict = judge_all<Word>(block, refused);
    any_nonzero_ |= verdict.any_nonzero;
    if (verdict.bad && !first_bad_)
      first_bad_ = count_ + *find_bad<Word>(block.data(), block.size() / sizeof(Word), refused);
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
