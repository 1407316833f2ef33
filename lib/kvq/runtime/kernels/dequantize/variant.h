#pragma once

#include <kvq/runtime/kernels/common/dequantize_variant.h>
#include <kvq/runtime/kernels/dequantize/params.h>

#include <span>

namespace kvq {

/// All tuned variants that are built.
std::span<const DequantizeVariant* const> dequantize_variants();

/// The generic variant of one format, for which generic_supports() must be true.
DequantizeVariant generic_dequantize(const CacheFormat& format, bool bf16);

/// The tuned variant for the bit tiles of one format. @param decoded  the sides whose rows are coded, else linear
/// (tuned_rows() of plan/serving.h); dequantizes_coded() or dequantizes_linear() of their tiles must be true
DequantizeVariant bits_dequantize(const CacheFormat& format, DecodedSides decoded, bool bf16);

/// The format that a caller needs a variant for.
struct DequantizeKey {
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;
  bool bf16 = true;
};

/// The tuned variant of exactly this format, or null.
const DequantizeVariant* find_dequantize_variant(const DequantizeKey& key);

/// Checks the preconditions of a launch: sizes, alignment, pointers that belong together. Host only; reads no device
/// memory.
Status check_dequantize(const DequantizeVariant& variant, const DequantizeParams& params);

/// The checks of the cache alone. @param verb  name of the operation, for messages
Status check_cache(const char* verb, const DequantizeVariant& variant, const PagedCacheView& cache);

}  // namespace kvq
