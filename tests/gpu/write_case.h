#pragma once

#include <kvq/plan/layer_plan.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvq::test {

/// Rows of a model in 16 bits, their destinations, and how they are rotated and quantized.
struct WriteCase {
  int num_tokens = 0, num_kv_heads = 1, page_size = 64, num_pages = 1;
  std::vector<std::uint16_t> k, v;          ///< [T, Hkv, D]
  std::vector<std::int64_t> slot_mapping;   ///< [T]
  std::vector<std::int8_t> signs;           ///< [Hkv, D] or empty, of both sides
  std::vector<float> matrix_k, matrix_v;    ///< dense rotations [Hkv, D, D] or, for all heads, [D, D]; or empty
  std::vector<float> inverse_k, inverse_v;  ///< of matrices that are not orthogonal, or empty
  std::vector<float> scale_k, scale_v;      ///< channel_scale [Hkv, D], or empty
  std::vector<float> center_k, center_v;    ///< [Hkv, D] or empty; [D] with one matrix for all heads
  std::vector<double> clip_k, clip_v;       ///< clip ratios [Hkv] or empty; [1] likewise
  int order_k = 1, order_v = 1;
  ScaleRule rule_k = ScaleRule::minmax, rule_v = ScaleRule::minmax;
};

/// The tuned variants that take a WriteCase; coded_write_test.cpp tests those of rows with centroids.
std::vector<const WriteVariant*> plain_write_variants();

/// The TensorPlan of one side, for the codec.
TensorPlan write_plan(const WriteVariant& variant, const WriteCase& c, Side side);

/// Writes the rows into pages that hold `before`. @return  the pages
/// @throws std::runtime_error for a status or a CUDA error
std::vector<std::byte> run_write_case(const WriteVariant& variant, const WriteCase& c,
                                      const std::vector<std::byte>& before);

float from_16_bits(std::uint16_t bits, bool bf16);
std::uint16_t to_16_bits(float x, bool bf16);

}  // namespace kvq::test
