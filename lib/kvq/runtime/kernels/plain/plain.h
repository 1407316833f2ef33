#pragma once

#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/runtime/kernels/demote/variant.h>
#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/runtime/kernels/plain/format.h>
#include <kvq/runtime/kernels/prefill/variant.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>

/// Kernels that take a cache's format as run-time values, for what pages hold (formats/pages.md) and has no row in
/// variants.json. They are simple; rows are quicker.
namespace kvq {

/// Do plain kernels take such pages? The sides must be ones that page_layout_of() makes.
constexpr bool plain_takes(const CacheFormat& format) {
  return format.k.head_dim <= kPlainHeadDim && format.v.head_dim <= kPlainHeadDim;
}

/// Variants of one format, which plain_takes(). Any number of query heads of a KV head; max_heads is what was asked
/// for.
DecodeVariant plain_decode(const CacheFormat& format, int heads, bool bf16);
WriteVariant plain_write(const CacheFormat& format, bool bf16);
DemoteVariant plain_demote(const CacheFormat& format);
DequantizeVariant plain_dequantize(const CacheFormat& format, bool bf16);
/// Attention over what plain kernels dequantise, whatever kernel `rows` has.
PrefillVariant plain_prefill(const DequantizeVariant& rows);

}  // namespace kvq
