#include "support/random_data.h"

#include <bit>
#include <cmath>
#include <numbers>

namespace kvq::test {

double Random::uniform(double low, double high) {
  const double unit = (static_cast<double>(engine_() >> 11) + 0.5) * 0x1p-53;
  return low + (high - low) * unit;
}

double Random::normal() {
  const double radius = std::sqrt(-2.0 * std::log(uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * uniform());
}

int Random::integer(int low, int high) {
  return low + static_cast<int>(engine_() % static_cast<std::uint64_t>(high - low + 1));
}

std::vector<double> gaussian_double(std::size_t count, std::uint64_t seed, double scale) {
  Random random(seed);
  std::vector<double> numbers(count);
  for (double& number : numbers) number = scale * random.normal();
  return numbers;
}

std::vector<float> gaussian(std::size_t count, std::uint64_t seed, double scale) {
  const std::vector<double> numbers = gaussian_double(count, seed, scale);
  return {numbers.begin(), numbers.end()};
}

std::vector<float> rows_with_outliers(std::size_t rows, int dim, std::uint64_t seed, double factor) {
  std::vector<float> numbers = gaussian(rows * static_cast<std::size_t>(dim), seed);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const auto channel = i % static_cast<std::size_t>(dim);
    if (channel % 13 == 3) numbers[i] = static_cast<float>(factor * (numbers[i] + 0.5));
  }
  return numbers;
}

float any_finite(Random& random) {
  for (;;) {
    const float number = std::bit_cast<float>(random.bits());
    if (std::isfinite(number)) return number;
  }
}

float any_not_finite(Random& random) {
  const std::uint32_t pattern = random.bits() | 0x7f800000u;
  return std::bit_cast<float>(random.integer(0, 2) == 0 ? pattern & 0xff800000u : pattern);
}

void spoil(std::vector<float>& row, Random& random) {
  for (int count = random.integer(1, 3); count > 0; --count)
    row[static_cast<std::size_t>(random.integer(0, static_cast<int>(row.size()) - 1))] = any_not_finite(random);
}

}  // namespace kvq::test
