#pragma once

#include <kvq/plan/layer_plan.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// The reference codec on the CPU. It defines the meaning of bytes and follows formats/packing.md line by line. Tests
/// compare the codec with formats/vectors.json, and every kernel with the codec.
namespace kvq {

/// R of packing.md: rounds to the scale type, to nearest even, saturating.
float round_to(ScaleType type, float value);

/// step[b] of packing.md (b), b = 1..8: the mid-rise step of least squared error for a unit Gaussian.
float gaussian_step(int bits);

/// Mid-rise codes c(x, s) of packing.md (b).
void mid_rise_codes(std::span<const float> x, float step, int bits, std::span<std::uint8_t> codes);
/// Odd level l(c) of a mid-rise code.
inline int odd_level(std::uint8_t code, int bits) { return 2 * code - (1 << bits) + 1; }

/// Row threshold of the percentile clip: sorted |x| at min(floor(rho * D), D - 1).
float clip_threshold(std::span<const float> row, double clip_ratio);

/// Groups in a row of `dim` channels times numbers per group.
int numbers_per_row(const UniformCoder& coder, int dim);

/// Quantizes one row.
/// @param row      [D]; if a channel is not finite, the row is poisoned (poisoned.h)
/// @param codes    [D], each below 2^bits
/// @param numbers  [G] scales, then for affine [G] minima or zero-points; each representable in the scale type
/// @throws         Error{internal} if extents disagree
void encode_row(const UniformCoder& coder, double clip_ratio, std::span<const float> row, std::span<std::uint8_t> codes,
                std::span<float> numbers);

/// Dequantizes one row.
/// @param out  [D], x_hat of packing.md
void decode_row(const UniformCoder& coder, std::span<const std::uint8_t> codes, std::span<const float> numbers,
                std::span<float> out);

/// Bytes of one row and back; `bytes` is [row_bytes(coder, D)].
void pack_row(const UniformCoder& coder, std::span<const std::uint8_t> codes, std::span<const float> numbers,
              std::span<std::byte> bytes);
void unpack_row(const UniformCoder& coder, std::span<const std::byte> bytes, std::span<std::uint8_t> codes,
                std::span<float> numbers);

/// Little-endian bit stream of codes of `bits` bits, padded with zeros to a byte.
void pack_codes(std::span<const std::uint8_t> codes, int bits, std::span<std::byte> bytes);
void unpack_codes(std::span<const std::byte> bytes, int bits, std::span<std::uint8_t> codes);

/// Scales and minima in the bytes of the scale type, little-endian, from the first byte of `bytes` on.
void store_numbers(ScaleType type, std::span<const float> numbers, std::span<std::byte> bytes);
void load_numbers(ScaleType type, std::span<const std::byte> bytes, std::span<float> numbers);

/// Quantizes and dequantizes one row of one width in place. Exact rows are rounded to bfloat16; a channel that is not
/// finite becomes NaN. For many rows, and for mixed widths, see RowCodec.
void quantize_row(const Coder& coder, double clip_ratio, std::span<float> row);
void quantize_exact(std::span<float> row);

/// x_rot = (x - offset) @ A for one row of one KV head. The offset is the center or centroid `centroid`. x - offset is
/// float32; the product with A is summed in double and rounded to float once.
void rotate_row(const TensorPlan& plan, int kv_head, std::span<const float> x, std::span<float> x_rot,
                int centroid = 0);
/// x = x_rot @ A^-1 + offset, in double, rounded to float once.
void unrotate_row(const TensorPlan& plan, int kv_head, std::span<const float> x_rot, std::span<float> x,
                  int centroid = 0);

/// Replaces rows by those that attention reads when `plan` stores them: rotated, quantized, dequantized, rotated back.
/// x is [rows, D] of one KV head, in place.
/// @throws Error{numerical} if a rotated row is not finite, because tools refuse poisoned rows; Error{internal} for
/// centroids of scope joint, whose index needs all heads: see reconstruct_heads()
void reconstruct(const TensorPlan& plan, int kv_head, std::span<float> x, int dim);
/// The same for all KV heads: x is [H, rows, D].
void reconstruct_heads(const TensorPlan& plan, int num_kv_heads, std::span<float> x, int dim);

/// Plain causal attention of one query head over one sequence in double: out [T, Dv].
/// @param q, k  [T, D]; @param v [T, Dv]; @param window  0 = all keys, else the last `window` keys, the query's own
///              included
void attend(std::span<const float> q, std::span<const float> k, std::span<const float> v, int dim, int v_dim,
            double scale, int window, std::span<double> out);

}  // namespace kvq
