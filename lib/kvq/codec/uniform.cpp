#include <kvq/codec/arithmetic.h>
#include <kvq/codec/codec.h>
#include <kvq/codec/poisoned.h>
#include <kvq/core/dtype.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

// Every line is one rounding of packing.md. The whole project is compiled with -ffp-contract=off, so a product and a
// sum stay two operations.

namespace kvq {

namespace {

constexpr float kLargest = std::numeric_limits<float>::max();
using arithmetic::energy;
using arithmetic::kLargestGroup;
using arithmetic::tree_sum;

constexpr std::array<float, 9> kGaussianStep = {0.0f,        1.5957691f,  0.9956867f,   0.58601946f, 0.3352006f,
                                                0.18813878f, 0.10406301f, 0.056867674f, 0.030762387f};

// floor(clamp(y, 0, n)) equals clamp(floor(y), 0, n) for whole n, and truncation equals floor for floats from 0 to
// 2^31. With truncation the loop needs no call and vectorizes.
std::uint8_t clamp_code(float y, float n) {
  return static_cast<std::uint8_t>(static_cast<int>(std::min(std::max(y, 0.0f), n)));
}

void encode_affine_float(const UniformCoder& coder, std::span<const float> x, float n, float lo, float range,
                         std::span<std::uint8_t> codes, float& scale, float& minimum) {
  scale = round_to(coder.scale_type, range / n);
  minimum = round_to(coder.scale_type, lo) + 0.0f;  // -0 becomes +0
  if (scale == 0.0f) return std::fill(codes.begin(), codes.end(), std::uint8_t{0});
  for (std::size_t i = 0; i < x.size(); ++i) codes[i] = clamp_code((x[i] - minimum) / scale + 0.5f, n);
}

void encode_affine_integer(const UniformCoder& coder, std::span<const float> x, float n, float lo, float range,
                           std::span<std::uint8_t> codes, float& scale, float& zero) {
  scale = round_to(coder.scale_type, range / n);
  zero = 0.0f;
  if (scale == 0.0f) return std::fill(codes.begin(), codes.end(), std::uint8_t{0});
  zero = round_to(coder.scale_type, std::floor(-lo / scale + 0.5f));
  for (std::size_t i = 0; i < x.size(); ++i) codes[i] = clamp_code(std::floor(x[i] / scale + 0.5f) + zero, n);
}

void encode_affine(const UniformCoder& coder, std::span<const float> x, std::span<std::uint8_t> codes, float& scale,
                   float& zero) {
  const auto [lowest, highest] = std::minmax_element(x.begin(), x.end());
  const float range = std::min(*highest - *lowest, kLargest) + 0.0f;  // a zero range is +0, whichever zeros were found
  const auto n = static_cast<float>((1 << coder.bits) - 1);
  if (coder.zero == ZeroKind::integer)
    encode_affine_integer(coder, x, n, *lowest, range, codes, scale, zero);
  else
    encode_affine_float(coder, x, n, *lowest, range, codes, scale, zero);
}

/// The stored scale of the rules norm and least_squares, from the codes that the first step size gave.
float refit_scale(const UniformCoder& coder, std::span<const float> x, std::span<const std::uint8_t> codes, float e) {
  std::array<float, kLargestGroup> products;
  int norm = 0;  // at most 1024 * 255^2 < 2^27
  for (std::size_t i = 0; i < x.size(); ++i) {
    const int level = odd_level(codes[i], coder.bits);
    norm += level * level;
    products[i] = x[i] * static_cast<float>(level);
  }
  const auto n = static_cast<float>(norm);
  if (coder.rule == ScaleRule::norm) return round_to(coder.scale_type, std::sqrt(4.0f * e / n));
  return round_to(coder.scale_type, 2.0f * tree_sum(products, x.size()) / n);
}

void encode_symmetric(const UniformCoder& coder, std::span<const float> x, std::span<std::uint8_t> codes,
                      float& scale) {
  if (coder.rule == ScaleRule::absmax) {
    float largest = 0.0f;
    for (const float value : x) largest = std::max(largest, std::abs(value));
    scale = round_to(coder.scale_type, 2.0f * largest / static_cast<float>((1 << coder.bits) - 1));
    return mid_rise_codes(x, scale, coder.bits, codes);
  }
  const float e = energy(x);
  const float sigma = std::sqrt(e / static_cast<float>(x.size()));
  const float step = round_to(coder.scale_type, kGaussianStep[static_cast<std::size_t>(coder.bits)] * sigma);
  mid_rise_codes(x, step, coder.bits, codes);
  scale = step == 0.0f ? 0.0f : refit_scale(coder, x, codes, e);
}

void check_row(const UniformCoder& coder, std::size_t dim, std::size_t codes, std::size_t numbers) {
  KVQ_ASSERT(coder.bits >= 1 && coder.bits <= 8);
  KVQ_ASSERT(coder.group_size >= 1 && coder.group_size <= kLargestGroup &&
             dim % static_cast<std::size_t>(coder.group_size) == 0);
  KVQ_ASSERT(codes == dim && numbers == static_cast<std::size_t>(numbers_per_row(coder, static_cast<int>(dim))));
}

}  // namespace

float round_to(ScaleType type, float value) {
  switch (type) {
    case ScaleType::fp16: return f16_to_float(float_to_f16(value));
    case ScaleType::bf16: return bf16_to_float(float_to_bf16(value));
    case ScaleType::fp32: return std::min(std::max(value, -kLargest), kLargest);
  }
  return value;
}

float gaussian_step(int bits) { return kGaussianStep[static_cast<std::size_t>(bits)]; }

// clamp(floor(x / s) + 2^(b-1), 0, 2^b - 1) without calling floor.
void mid_rise_codes(std::span<const float> x, float step, int bits, std::span<std::uint8_t> codes) {
  const int half = 1 << (bits - 1);
  if (step == 0.0f) return std::fill(codes.begin(), codes.end(), static_cast<std::uint8_t>(half));
  const auto limit = static_cast<float>(half);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float y = std::min(std::max(x[i] / step, -limit), limit);
    const int truncated = static_cast<int>(y);
    const int floored = truncated - (y < static_cast<float>(truncated) ? 1 : 0);
    codes[i] = static_cast<std::uint8_t>(std::min(floored, half - 1) + half);
  }
}

float clip_threshold(std::span<const float> row, double clip_ratio) {
  KVQ_ASSERT(!row.empty() && row.size() <= kLargestGroup);
  std::array<float, kLargestGroup> magnitudes;
  std::transform(row.begin(), row.end(), magnitudes.begin(), [](float x) { return std::abs(x); });
  const auto dim = row.size();
  const auto index = std::min(static_cast<std::size_t>(std::floor(clip_ratio * static_cast<double>(dim))), dim - 1);
  const auto nth = magnitudes.begin() + static_cast<std::ptrdiff_t>(index);
  std::nth_element(magnitudes.begin(), nth, magnitudes.begin() + static_cast<std::ptrdiff_t>(dim));
  return *nth;
}

int numbers_per_row(const UniformCoder& coder, int dim) { return dim / coder.group_size * coder.numbers_per_group(); }

void encode_row(const UniformCoder& coder, double clip_ratio, std::span<const float> row, std::span<std::uint8_t> codes,
                std::span<float> numbers) {
  check_row(coder, row.size(), codes.size(), numbers.size());
  if (!is_finite(row)) return poison(codes, numbers);  // before the clip, which would hide infinities
  std::array<float, kLargestGroup> clipped;
  const bool clips = coder.rule == ScaleRule::minmax && clip_ratio < 1.0;
  if (clips) {
    const float tau = clip_threshold(row, clip_ratio);
    std::transform(row.begin(), row.end(), clipped.begin(),
                   [tau](float x) { return std::min(std::max(x, -tau), tau); });
    row = std::span<const float>{clipped.data(), row.size()};
  }
  const auto size = static_cast<std::size_t>(coder.group_size);
  const std::size_t groups = row.size() / size;
  for (std::size_t g = 0; g < groups; ++g) {
    const auto x = row.subspan(g * size, size);
    const auto c = codes.subspan(g * size, size);
    if (coder.levels == UniformLevels::affine)
      encode_affine(coder, x, c, numbers[g], numbers[groups + g]);
    else
      encode_symmetric(coder, x, c, numbers[g]);
  }
}

void decode_row(const UniformCoder& coder, std::span<const std::uint8_t> codes, std::span<const float> numbers,
                std::span<float> out) {
  check_row(coder, out.size(), codes.size(), numbers.size());
  const auto size = static_cast<std::size_t>(coder.group_size);
  const std::size_t groups = out.size() / size;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const float scale = numbers[i / size];
    if (coder.levels == UniformLevels::symmetric)
      out[i] = scale * (static_cast<float>(odd_level(codes[i], coder.bits)) * 0.5f);
    else if (coder.zero == ZeroKind::integer)
      out[i] = (static_cast<float>(codes[i]) - numbers[groups + i / size]) * scale;
    else
      out[i] = static_cast<float>(codes[i]) * scale + numbers[groups + i / size];
  }
}

void quantize_exact(std::span<float> row) {
  for (float& x : row) x = bf16_to_float(exact_bits(x));
}

}  // namespace kvq
