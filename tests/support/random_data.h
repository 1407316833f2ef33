#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace kvq::test {

/// Seeded random numbers for test data, equal on every machine. Independent of the library's generator.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint32_t bits() { return static_cast<std::uint32_t>(engine_() >> 32); }
  double uniform(double low = 0.0, double high = 1.0);  ///< in (low, high)
  double normal();
  int integer(int low, int high);  ///< both ends included

 private:
  std::mt19937_64 engine_;
};

std::vector<float> gaussian(std::size_t count, std::uint64_t seed, double scale = 1.0);
std::vector<double> gaussian_double(std::size_t count, std::uint64_t seed, double scale = 1.0);

/// Rows [rows, dim] that resemble keys: Gaussian, with a few channels `factor` times as large and with a mean.
std::vector<float> rows_with_outliers(std::size_t rows, int dim, std::uint64_t seed, double factor = 20.0);

/// Any finite binary32; every bit pattern is equally likely, so all exponents, subnormals and both zeros occur.
float any_finite(Random& random);
/// NaN of any pattern, or an infinity.
float any_not_finite(Random& random);
/// Puts numbers that are not finite into 1 to 3 random channels.
void spoil(std::vector<float>& row, Random& random);

}  // namespace kvq::test
