#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvq {

/// TurboQuant's codes for inner products (arXiv 2504.19874, Algorithm 2), to compare with; no artifact stores them. A
/// row x of length |x| is rotated by a Haar matrix to y, quantized by TurboQuant-MSE with b - 1 bits to y', and the
/// signs of S (y - y'), S Gaussian, take the last bit:
///     x_hat = |x| (y' + |y - y'| sqrt(pi / 2) / d  S^T sign(S (y - y'))) R^T
/// so that E<q, x_hat> = <q, x> for every q. Both lengths are kept in fp16.
class TurboQuantQjl {
 public:
  /// @param bits  1..8, the sign bit included
  TurboQuantQjl(int dim, int bits, std::uint64_t seed, int layer, int head);

  /// Quantizes and dequantizes rows [n, dim] in place.
  void reconstruct(std::span<float> rows) const;

  /// Bits of a channel, both lengths included.
  static double effective_bits(int dim, int bits) { return bits + 32.0 / dim; }

 private:
  void keep_sketch(std::span<float> residual) const;

  int dim_;
  std::vector<float> rotation_, sketch_;     ///< R and S^T, [dim, dim]
  std::vector<float> entries_, thresholds_;  ///< for rows of length 1
};

}  // namespace kvq
