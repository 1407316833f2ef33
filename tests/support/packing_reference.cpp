#include "support/packing_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvq::test {

namespace {

constexpr double kLargest = static_cast<double>(std::numeric_limits<float>::max());
constexpr float kStep[] = {0.0f,        1.5957691f,  0.9956867f,   0.58601946f, 0.3352006f,
                           0.18813878f, 0.10406301f, 0.056867674f, 0.030762387f};

double f32(double value) { return static_cast<double>(static_cast<float>(value)); }

double tree(std::vector<double> numbers) {
  std::size_t size = 1;
  while (size < numbers.size()) size *= 2;
  numbers.resize(size, 0.0);
  for (; size > 1; size /= 2)
    for (std::size_t i = 0; i < size / 2; ++i) numbers[i] = f32(numbers[2 * i] + numbers[2 * i + 1]);
  return numbers[0];
}

struct Group {
  std::vector<double> codes, decoded;
  std::vector<double> numbers;  ///< scale, then minimum or zero point
};

Group affine_group(const UniformCoder& coder, const std::vector<double>& x) {
  const double n = std::pow(2.0, coder.bits) - 1.0;
  const double lo = *std::min_element(x.begin(), x.end()), hi = *std::max_element(x.begin(), x.end());
  const double range = std::min(f32(hi - lo), kLargest);
  const double s = nearest_in(coder.scale_type, f32(range / n));
  const bool floating = coder.zero == ZeroKind::floating;
  double m = 0.0;
  if (floating) {
    m = nearest_in(coder.scale_type, lo) + 0.0;  // -0 + 0 is +0
  } else if (s != 0.0) {
    m = nearest_in(coder.scale_type, std::floor(f32(f32(-lo / s) + 0.5)));
  }
  Group group{{}, {}, {s, m}};
  for (const double value : x) {
    double code = 0.0;
    if (s != 0.0) {
      code = floating ? std::floor(f32(f32(f32(value - m) / s) + 0.5)) : f32(std::floor(f32(f32(value / s) + 0.5)) + m);
      code = std::clamp(code, 0.0, n);
    }
    group.codes.push_back(code);
    if (s == 0.0) {
      group.decoded.push_back(floating ? m : 0.0);
    } else {
      group.decoded.push_back(floating ? f32(f32(code * s) + m) : f32(f32(code - m) * s));
    }
  }
  return group;
}

Group symmetric_group(const UniformCoder& coder, const std::vector<double>& x) {
  const double half = std::pow(2.0, coder.bits - 1), n = 2.0 * half - 1.0;
  const auto g = static_cast<double>(x.size());
  std::vector<double> squares;
  double largest = 0.0;
  for (const double value : x) {
    squares.push_back(f32(value * value));
    largest = std::max(largest, std::abs(value));
  }
  const double energy = tree(squares);
  const double step =
      coder.rule == ScaleRule::absmax
          ? nearest_in(coder.scale_type, f32(f32(2.0 * largest) / n))
          : nearest_in(coder.scale_type, f32(static_cast<double>(kStep[coder.bits]) * f32(std::sqrt(f32(energy / g)))));
  Group group;
  const bool empty = step == 0.0 || (coder.rule != ScaleRule::absmax && energy == 0.0);
  std::vector<double> products;
  double squared_levels = 0.0;
  for (const double value : x) {
    const double code = empty ? half : std::clamp(f32(std::floor(f32(value / step)) + half), 0.0, n);
    const double level = 2.0 * code - 2.0 * half + 1.0;
    group.codes.push_back(code);
    products.push_back(f32(value * level));
    squared_levels += level * level;
  }
  double scale = step;
  if (empty) {
    scale = 0.0;
  } else if (coder.rule == ScaleRule::least_squares) {
    scale = nearest_in(coder.scale_type, f32(f32(2.0 * tree(products)) / f32(squared_levels)));
  } else if (coder.rule == ScaleRule::norm) {
    scale = nearest_in(coder.scale_type, f32(std::sqrt(f32(f32(4.0 * energy) / f32(squared_levels)))));
  }
  group.numbers = {scale};
  for (const double code : group.codes) group.decoded.push_back(f32(scale * ((2.0 * code - 2.0 * half + 1.0) / 2.0)));
  return group;
}

std::vector<double> clipped(std::span<const float> row, double clip_ratio) {
  std::vector<double> x(row.begin(), row.end());
  if (clip_ratio >= 1.0) return x;
  std::vector<double> magnitudes;
  for (const double value : x) magnitudes.push_back(std::abs(value));
  std::sort(magnitudes.begin(), magnitudes.end());
  const auto last = static_cast<double>(x.size() - 1);
  const double tau =
      magnitudes[static_cast<std::size_t>(std::min(std::floor(clip_ratio * static_cast<double>(x.size())), last))];
  for (double& value : x) value = std::min(std::max(value, -tau), tau);
  return x;
}

/// The row of codes 0 and NaNs.
ReferenceRow poisoned_row(const UniformCoder& coder, std::size_t dim) {
  const std::size_t numbers = dim / static_cast<std::size_t>(coder.group_size) *
                              (coder.levels == UniformLevels::affine ? std::size_t{2} : std::size_t{1});
  return {std::vector<std::uint8_t>(dim, 0), std::vector<float>(numbers, kPoison), std::vector<float>(dim, kPoison)};
}

}  // namespace

bool all_finite(std::span<const float> row) {
  return std::all_of(row.begin(), row.end(), [](float x) { return std::abs(static_cast<double>(x)) <= kLargest; });
}

double nearest(double value, int precision, int min_exponent, double largest) {
  if (value == 0.0 || std::isnan(value)) return value;
  if (std::isinf(value)) return std::copysign(largest, value);
  const int exponent = std::max(std::ilogb(value), min_exponent) - (precision - 1);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -exponent)), exponent);
  return std::abs(rounded) > largest ? std::copysign(largest, value) : std::copysign(rounded, value);
}
double nearest_f16(double value) { return nearest(value, 11, -14, 65504.0); }
double nearest_bf16(double value) { return nearest(value, 8, -126, std::ldexp(255.0, 120)); }

double nearest_in(ScaleType type, double value) {
  switch (type) {
    case ScaleType::fp16: return nearest_f16(value);
    case ScaleType::bf16: return nearest_bf16(value);
    case ScaleType::fp32: return nearest(value, 24, -126, kLargest);
  }
  return value;
}

ReferenceRow reference_row(const UniformCoder& coder, double clip_ratio, std::span<const float> row) {
  if (!all_finite(row)) return poisoned_row(coder, row.size());
  const std::vector<double> x =
      coder.rule == ScaleRule::minmax ? clipped(row, clip_ratio) : std::vector<double>(row.begin(), row.end());
  ReferenceRow result;
  std::vector<float> second;
  for (auto begin = x.begin(); begin != x.end(); begin += coder.group_size) {
    const std::vector<double> channels(begin, begin + coder.group_size);
    const Group group =
        coder.levels == UniformLevels::affine ? affine_group(coder, channels) : symmetric_group(coder, channels);
    for (const double code : group.codes) result.codes.push_back(static_cast<std::uint8_t>(code));
    for (const double value : group.decoded) result.decoded.push_back(static_cast<float>(value));
    result.numbers.push_back(static_cast<float>(group.numbers[0]));
    if (group.numbers.size() == 2) second.push_back(static_cast<float>(group.numbers[1]));
  }
  result.numbers.insert(result.numbers.end(), second.begin(), second.end());
  return result;
}

std::vector<std::uint8_t> reference_stream(std::span<const std::uint8_t> codes, int bits) {
  const auto width = static_cast<std::size_t>(bits);
  std::vector<std::uint8_t> bytes((codes.size() * width + 7) / 8, 0);
  for (std::size_t bit = 0; bit < codes.size() * width; ++bit) {
    const unsigned value = (static_cast<unsigned>(codes[bit / width]) >> (bit % width)) & 1u;
    bytes[bit / 8] = static_cast<std::uint8_t>(bytes[bit / 8] | (value << (bit % 8)));
  }
  return bytes;
}

}  // namespace kvq::test
