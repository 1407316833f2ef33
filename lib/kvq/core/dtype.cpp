#include <kvq/core/dtype.h>

#include <kvq/core/error.h>

#include <cmath>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define KVQ_X86 1
#endif

namespace kvq {

std::size_t size_of(DType type) {
  switch (type) {
    case DType::i8:
    case DType::u8: return 1;
    case DType::f16:
    case DType::bf16:
    case DType::u16: return 2;
    case DType::f32: return 4;
    case DType::f64:
    case DType::i64: return 8;
  }
  return 0;
}

std::optional<DType> activation_dtype(std::string_view name) {
  if (name == "float32") return DType::f32;
  if (name == "float16") return DType::f16;
  if (name == "bfloat16") return DType::bf16;
  return std::nullopt;
}

std::string_view activation_name(DType type) {
  switch (type) {
    case DType::f32: return "float32";
    case DType::f16: return "float16";
    case DType::bf16: return "bfloat16";
    default: return "not an activation type";
  }
}

float f16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in binary32
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -magnitude : magnitude;
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const auto result = static_cast<std::uint16_t>(rounded >> 16);
  if ((result & 0x7fffu) >= 0x7f80u) return static_cast<std::uint16_t>((result & 0x8000u) | 0x7f7fu);
  return result;
}

std::uint16_t float_to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7bffu);  // 65520 and more
  if (magnitude < 0x38800000u) {
    // Subnormal result: adding 0.5 lets the hardware round to multiples of 2^-24, to nearest even.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

namespace {

#ifdef KVQ_X86
__attribute__((target("avx,f16c"))) void widen_f16_f16c(const std::byte* source, std::size_t count, float* target) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + 2 * i));
    _mm256_storeu_ps(target + i, _mm256_cvtph_ps(half));
  }
  for (; i < count; ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, source + 2 * i, 2);
    target[i] = f16_to_float(bits);
  }
}
#endif

void widen_f16(const std::byte* source, std::size_t count, float* target) {
#ifdef KVQ_X86
  // Widening is exact, so the fast path and the portable one agree in every bit.
  static const bool has_f16c = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  if (has_f16c) return widen_f16_f16c(source, count, target);
#endif
  for (std::size_t i = 0; i < count; ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, source + 2 * i, 2);
    target[i] = f16_to_float(bits);
  }
}

}  // namespace

void widen(DType type, const std::byte* source, std::size_t count, float* target) {
  switch (type) {
    case DType::f32: std::memcpy(target, source, 4 * count); return;
    case DType::f16: widen_f16(source, count, target); return;
    case DType::bf16:
      for (std::size_t i = 0; i < count; ++i) {
        std::uint16_t bits;
        std::memcpy(&bits, source + 2 * i, 2);
        target[i] = bf16_to_float(bits);
      }
      return;
    default: throw Error{ErrorKind::internal, "bug: widen() of a type that is no activation type"};
  }
}

}  // namespace kvq
