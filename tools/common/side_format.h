#pragma once

#include <kvq/plan/page_layout.h>

#include <string>

namespace kvq::bench {

/// How one side is stored, in the notation of runtime/variants.json: u2g128 = affine codes of 2 bits in groups of 128,
/// s = symmetric, behind them z = integer zero points, then b = numbers in bfloat16, f = in fp32, then i1 = indices of
/// up to 256 centroids, i2 = of more; bf16 = exact rows; w8n1 = bit tiles with rows of 8 words and one number, behind
/// it t3 or t4: codebook codes of so many bits; c: those of mixed widths, as Block-GTQ has them.
struct SideFormat {
  TileSide side;
  bool bfloat = false;
};

/// @throws Error{usage} that names `flag` if `text` is no side format
SideFormat parse_side(const std::string& text, int head_dim, const char* flag);
/// "u2g128", or "u4g128/u2g128" where K and V differ.
std::string cache_name(const TileSide& k, bool k_bfloat, const TileSide& v, bool v_bfloat);
/// @param variant  a kernel variant of any verb
template <typename Variant>
std::string cache_name(const Variant& variant) {
  return cache_name(variant.k, variant.k_bfloat, variant.v, variant.v_bfloat);
}

}  // namespace kvq::bench
