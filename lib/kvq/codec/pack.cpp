#include <kvq/codec/codec.h>
#include <kvq/core/dtype.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace kvq {

static_assert(std::endian::native == std::endian::little, "packed rows are written in the machine's byte order");

namespace {

void store_number(ScaleType type, float value, std::byte* target) {
  if (type == ScaleType::fp32) {
    std::memcpy(target, &value, 4);
    return;
  }
  const std::uint16_t bits = type == ScaleType::fp16 ? float_to_f16(value) : float_to_bf16(value);
  std::memcpy(target, &bits, 2);
}

float load_number(ScaleType type, const std::byte* source) {
  if (type == ScaleType::fp32) {
    float value;
    std::memcpy(&value, source, 4);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, source, 2);
  return type == ScaleType::fp16 ? f16_to_float(bits) : bf16_to_float(bits);
}

}  // namespace

void store_numbers(ScaleType type, std::span<const float> numbers, std::span<std::byte> bytes) {
  const auto width = static_cast<std::size_t>(scale_bytes(type));
  KVQ_ASSERT(bytes.size() >= numbers.size() * width);
  for (std::size_t i = 0; i < numbers.size(); ++i) store_number(type, numbers[i], bytes.data() + i * width);
}

void load_numbers(ScaleType type, std::span<const std::byte> bytes, std::span<float> numbers) {
  const auto width = static_cast<std::size_t>(scale_bytes(type));
  KVQ_ASSERT(bytes.size() >= numbers.size() * width);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = load_number(type, bytes.data() + i * width);
}

void pack_codes(std::span<const std::uint8_t> codes, int bits, std::span<std::byte> bytes) {
  KVQ_ASSERT(bits >= 1 && bits <= 8 && bytes.size() == (codes.size() * static_cast<std::size_t>(bits) + 7) / 8);
  std::size_t position = 0;
  std::fill(bytes.begin(), bytes.end(), std::byte{0});
  for (const std::uint8_t code : codes) {
    KVQ_ASSERT(code < (1 << bits));
    const unsigned shifted = unsigned{code} << (position % 8);
    bytes[position / 8] |= static_cast<std::byte>(shifted & 0xffu);
    if (shifted > 0xffu) bytes[position / 8 + 1] |= static_cast<std::byte>(shifted >> 8);
    position += static_cast<std::size_t>(bits);
  }
}

void unpack_codes(std::span<const std::byte> bytes, int bits, std::span<std::uint8_t> codes) {
  KVQ_ASSERT(bits >= 1 && bits <= 8 && bytes.size() == (codes.size() * static_cast<std::size_t>(bits) + 7) / 8);
  std::size_t position = 0;
  for (std::uint8_t& code : codes) {
    const std::size_t index = position / 8;
    unsigned window = std::to_integer<unsigned>(bytes[index]);
    if (index + 1 < bytes.size()) window |= std::to_integer<unsigned>(bytes[index + 1]) << 8;
    code = static_cast<std::uint8_t>((window >> (position % 8)) & ((1u << bits) - 1));
    position += static_cast<std::size_t>(bits);
  }
}

void pack_row(const UniformCoder& coder, std::span<const std::uint8_t> codes, std::span<const float> numbers,
              std::span<std::byte> bytes) {
  KVQ_ASSERT(bytes.size() == static_cast<std::size_t>(row_bytes(coder, static_cast<int>(codes.size()))));
  const std::size_t payload = (codes.size() * static_cast<std::size_t>(coder.bits) + 7) / 8;
  pack_codes(codes, coder.bits, bytes.first(payload));
  const auto width = static_cast<std::size_t>(scale_bytes(coder.scale_type));
  KVQ_ASSERT(bytes.size() == payload + numbers.size() * width);
  store_numbers(coder.scale_type, numbers, bytes.subspan(payload));
}

void unpack_row(const UniformCoder& coder, std::span<const std::byte> bytes, std::span<std::uint8_t> codes,
                std::span<float> numbers) {
  KVQ_ASSERT(bytes.size() == static_cast<std::size_t>(row_bytes(coder, static_cast<int>(codes.size()))));
  const std::size_t payload = (codes.size() * static_cast<std::size_t>(coder.bits) + 7) / 8;
  unpack_codes(bytes.first(payload), coder.bits, codes);
  const auto width = static_cast<std::size_t>(scale_bytes(coder.scale_type));
  KVQ_ASSERT(bytes.size() == payload + numbers.size() * width);
  load_numbers(coder.scale_type, bytes.subspan(payload), numbers);
}

}  // namespace kvq
