#pragma once

#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/runtime/kernels/demote/variant.h>
#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/runtime/kernels/plain/format.h>
#include <kvq/runtime/kernels/prefill/variant.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>

/// The generic (`plain`) kernels, which read a cache's format at run time: for all formats of formats/pages.md without
/// an entry in variants.json. They are simple; tuned kernels are faster.
namespace kvq {

/// Do the generic kernels support this format? The sides must be results of page_layout_of().
constexpr bool plain_takes(const CacheFormat& format) {
  return format.k.head_dim <= kPlainHeadDim && format.v.head_dim <= kPlainHeadDim;
}

/// Generic variants of one format, for which plain_takes() must be true. A KV head may have any number of query heads;
/// max_heads of the result is `heads`.
DecodeVariant plain_decode(const CacheFormat& format, int heads, bool bf16);
WriteVariant plain_write(const CacheFormat& format, bool bf16);
DemoteVariant plain_demote(const CacheFormat& format);
DequantizeVariant plain_dequantize(const CacheFormat& format, bool bf16);
/// Generic attention over rows of the generic dequantize kernel, even if `rows` is tuned.
PrefillVariant plain_prefill(const DequantizeVariant& rows);

}  // namespace kvq
