#pragma once

#include <kvq/plan/scheme.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// A second implementation of what packing.md says of trellis codes: their values, costs and searches. Plain and slow.
namespace kvq::test {

/// The codes c[j], c[j-1], ... c[j-m]. The last codes of the group come before the first.
std::vector<std::uint8_t> history(std::span<const std::uint8_t> codes, std::size_t j, int memory);
/// v of a channel whose code is history[0] and whose predecessors are history[1], ...
float trellis_value(const TrellisTaps& taps, std::span<const std::uint8_t> history);
/// Cost of tail-biting codes, summed in binary32 from the first channel on.
float closed_cost(const TrellisTaps& taps, std::span<const float> y, std::span<const std::uint8_t> codes);

/// The costs of the search `integer`, in units of 1 / U.
class IntegerCosts {
 public:
  IntegerCosts(const TrellisTaps& taps, std::span<const float> y);
  /// What the step of channel j adds. @param window  c[j] in the lowest bits, then c[j-1], ..., c[j-m]
  std::int64_t step(std::size_t j, std::size_t window) const;
  /// Cost of tail-biting codes.
  std::int64_t closed(std::span<const std::uint8_t> codes) const;
  std::int64_t unit() const { return unit_; }  ///< U

 private:
  std::int64_t level(std::size_t k, std::size_t code) const;                               ///< A[k][e]
  std::int64_t pair(std::size_t k, std::size_t code, std::size_t earlier) const;           ///< F[k][e, d], k > 0
  std::int64_t single(std::size_t code) const;                                             ///< F[0][e]
  std::int64_t gain(std::span<const std::int64_t> t, std::size_t j, std::size_t i) const;  ///< X[j][i]

  std::size_t bits_, memory_;
  std::int64_t unit_;
  std::vector<std::int64_t> a_;
  std::vector<std::int64_t> codes_cost_;          ///< [2^(b (m+1))] what the codes of a window cost without X
  std::vector<std::vector<std::int64_t>> gains_;  ///< [g][b] X
};

/// The seam z* that the first run of the taps' search finds.
std::size_t reference_seam(const TrellisTaps& taps, std::span<const float> y);
/// The codes that the taps' search finds.
std::vector<std::uint8_t> reference_codes(const TrellisTaps& taps, std::span<const float> y);

}  // namespace kvq::test
