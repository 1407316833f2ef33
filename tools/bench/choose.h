#pragma once

#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/runtime/kernels/prefill/variant.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>

#include <string>
#include <vector>

namespace kvq::bench {

/// The built variant of a cache whose sides are written as in variants.json.
/// @param heads  query heads of a KV head
/// @throws       Error{usage} for a side that is none, Error{unsupported} that lists what is built
const DecodeVariant& choose_decode(const std::string& k, const std::string& v, int head_dim, int heads, bool bf16);
const WriteVariant& choose_write(const std::string& k, const std::string& v, int head_dim, bool bf16);
/// Rows of the cache that prefill attention can take.
const DequantizeVariant& choose_prefill(const std::string& k, const std::string& v, int head_dim, bool bf16);

/// Every one that would be chosen for these sizes.
std::vector<const DecodeVariant*> all_decode(int head_dim, int heads, bool bf16);
std::vector<const WriteVariant*> all_write(int head_dim, bool bf16);
std::vector<const DequantizeVariant*> all_prefill(int head_dim, bool bf16);

}  // namespace kvq::bench
