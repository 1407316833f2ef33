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

/// y = x / d of a group.
struct Normalized {
  std::vector<float> y;
  float d = 0.0f;
};
Normalized normalized(ScaleType type, std::span<const float> x);

/// Bytes and numbers of one row: mixed, or of one width in codebook or trellis codes.
struct ReferenceBytes {
  std::vector<std::uint8_t> codes;
  std::vector<float> numbers, decoded;
  std::vector<std::byte> bytes;  ///< of mixed rows before padding to words
};
ReferenceBytes reference_plan_row(const TensorPlan& plan, int kv_head, int centroid, std::span<const float> row);

}  // namespace kvq::test
