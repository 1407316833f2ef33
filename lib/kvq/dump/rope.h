#pragma once

#include <kvq/core/geometry.h>

#include <cstdint>
#include <vector>

namespace kvq {

/// Rotation of one position, shared by all heads of a token: sines and cosines are what costs.
class Rotator {
 public:
  explicit Rotator(const RopeStyle& rope);
  void set_position(std::int64_t position);
  void apply(float* row) const;  ///< [head_dim], in place

 private:
  const RopeStyle& rope_;
  std::vector<double> cos_, sin_;  ///< [dim / 2], without attention_factor
};

}  // namespace kvq
