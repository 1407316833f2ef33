#pragma once

#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>

#include <string>
#include <vector>

/// Formats for tests of the generic kernels: a few special ones, and a random sample of all others.
namespace kvq::test {

struct GenericFormat {
  std::string name;
  CacheFormat format;
  int heads = 4;  ///< query heads of a KV head
  bool bf16 = true;
  DecodeVariant decode() const { return generic_decode(format, heads, bf16); }
  WriteVariant write() const { return generic_write(format, bf16); }
  DequantizeVariant dequantize() const { return generic_dequantize(format, bf16); }
};

/// The formats, the same for each call.
std::vector<GenericFormat> generic_formats();
/// The last of them: three bits, zero points and fp32 numbers, which no tuned kernel has.
std::vector<GenericFormat> later_formats();

}  // namespace kvq::test
