#pragma once

#include <kvq/plan/layer_plan.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// A second implementation of what packing.md 1.1 to 1.4 add: codebooks, trellises, mixed widths, one scale a row.
/// Plain and slow. Each binary32 operation is computed in double and rounded once, as in packing_reference.h.
namespace kvq::test {

struct ReferenceGroup {
  std::vector<std::uint8_t> codes;
  float scale = 0.0f;
  std::vector<float> decoded;
};
ReferenceGroup reference_codebook(std::span<const float> table, ScaleRule rule, ScaleType type,
                                  std::span<const float> x);
ReferenceGroup reference_trellis(const TrellisTaps& taps, ScaleRule rule, ScaleType type, std::span<const float> x);
ReferenceGroup reference_symmetric(int bits, ScaleRule rule, ScaleType type, std::span<const float> x);

/// v of a channel whose code is history[0] and whose predecessors are history[1], ...
float trellis_value(const TrellisTaps& taps, std::span<const std::uint8_t> history);
/// y = x / d of a group.
struct Normalized {
  std::vector<float> y;
  float d = 0.0f;
};
Normalized normalized(ScaleType type, std::span<const float> x);
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

/// Bytes and numbers of one row: mixed, or of one width in codebook or trellis codes.
struct ReferenceBytes {
  std::vector<std::uint8_t> codes;
  std::vector<float> numbers, decoded;
  std::vector<std::byte> bytes;  ///< of mixed rows before padding to words
};
ReferenceBytes reference_plan_row(const TensorPlan& plan, int kv_head, int centroid, std::span<const float> row);

}  // namespace kvq::test
