#pragma once

#include <vector>

/// Runs boundary() and boundary_factor() of the write kernels on the device.
namespace kvq::test {

struct Quotient {
  float threshold = 0.0f, divisor = 1.0f;
};

/// The first numbers whose quotients reach the thresholds.
std::vector<float> boundaries_of(const std::vector<Quotient>& quotients);

}  // namespace kvq::test
