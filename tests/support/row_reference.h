#pragma once

#include <kvq/plan/layer_plan.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// What packing.md 1.1 adds, written down a second time: codebooks, trellises, mixed widths. Plain and slow; every
/// binary32 step is made in double and rounded once, as in packing_reference.h.
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
/// y = x / d of a group, and d.
struct Normalised {
  std::vector<float> y;
  float d = 0.0f;
};
Normalised normalised(ScaleType type, std::span<const float> x);
/// Cost of codes that bite their tail, summed in binary32 from the first channel on.
float closed_cost(const TrellisTaps& taps, std::span<const float> y, std::span<const std::uint8_t> codes);
/// z* of the first run.
std::size_t reference_seam(const TrellisTaps& taps, std::span<const float> y);

/// One row of a plan that is mixed, or of one width in codebook or trellis codes.
struct ReferenceBytes {
  std::vector<std::uint8_t> codes;
  std::vector<float> numbers, decoded;
  std::vector<std::byte> bytes;  ///< of mixed rows before rounding to words
};
ReferenceBytes reference_plan_row(const TensorPlan& plan, int kv_head, int centroid, std::span<const float> row);

}  // namespace kvq::test
