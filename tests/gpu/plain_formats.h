#pragma once

#include <kvq/runtime/kernels/plain/plain.h>

#include <string>
#include <vector>

/// Formats for tests of the generic kernels: a few special ones, and a random sample of all others.
namespace kvq::test {

struct PlainFormat {
  std::string name;
  CacheFormat format;
  int heads = 4;  ///< query heads of a KV head
  bool bf16 = true;
  DecodeVariant decode() const { return plain_decode(format, heads, bf16); }
  WriteVariant write() const { return plain_write(format, bf16); }
  DemoteVariant demote() const { return plain_demote(format); }
  DequantizeVariant dequantize() const { return plain_dequantize(format, bf16); }
};

/// The formats, the same for each call.
std::vector<PlainFormat> plain_formats();

}  // namespace kvq::test
