#pragma once

#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/runtime/kernels/prefill/variant.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>

#include <string>
#include <vector>

namespace kvq::bench {

/// Finds the built variant for sides in the notation of variants.json.
/// @param heads       query heads of a KV head
/// @param new_tokens  of a sequence, of which the variant has rows for as many as any has
/// @throws       Error{usage} if `k` or `v` is no side, Error{unsupported} with the list of built variants if none fits
const DecodeVariant& choose_decode(const std::string& k, const std::string& v, int head_dim, int heads, bool bf16,
                                   int new_tokens = 1);
/// The generic kernels for sides in the notation of variants.json.
/// @throws  Error{usage} as above, Error{unsupported} for a head_dim that they do not take
const DecodeVariant& choose_generic_decode(const std::string& k, const std::string& v, int head_dim, int heads,
                                           bool bf16);
/// @param memory  of linear rows; 0: rows of 2 bits are codes of a codebook
/// @param rule    of linear rows
const WriteVariant& choose_write(const std::string& k, const std::string& v, int head_dim, bool bf16, int memory = 3,
                                 ScaleRule rule = ScaleRule::norm);
/// Finds the variant that dequantizes the cache for prefill attention.
const DequantizeVariant& choose_prefill(const std::string& k, const std::string& v, int head_dim, bool bf16);

/// All variants that choose_decode() can return for these sizes; likewise for writes of codes and for prefill.
std::vector<const DecodeVariant*> all_decode(int head_dim, int heads, bool bf16);
std::vector<const WriteVariant*> all_write(int head_dim, bool bf16);
std::vector<const DequantizeVariant*> all_prefill(int head_dim, bool bf16);

}  // namespace kvq::bench
