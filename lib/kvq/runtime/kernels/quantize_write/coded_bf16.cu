#include <kvq/runtime/kernels/quantize_write/coded.cuh>

namespace kvq::write {

WriteVariant coded_write_bf16(const CacheFormat& format, CodedRows k, CodedRows v) {
  return coded_write_variant<__nv_bfloat16>("quantize_write_coded_bf16", format, k, v);
}

}  // namespace kvq::write

namespace kvq {

WriteVariant coded_write(const CacheFormat& format, CodedRows k, CodedRows v, bool bf16) {
  return bf16 ? write::coded_write_bf16(format, k, v) : write::coded_write_fp16(format, k, v);
}

}  // namespace kvq
