#pragma once

#include <kvq/runtime/kernels/plain/plain.h>

#include <string>
#include <vector>

/// Formats for the plain kernels: a few that are special, and a sample of all others.
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

/// The same ones each time.
std::vector<PlainFormat> plain_formats();

}  // namespace kvq::test
