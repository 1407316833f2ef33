#pragma once

#include <kvq/core/geometry.h>

#include <cstdint>
#include <vector>

namespace kvq {

/// Applies RoPE at one position. All heads of a token share its sines and cosines, the costly part.
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
