#include <kvq/runtime/kernels/quantize_write/coded.cuh>

namespace kvq::write {

WriteVariant coded_write_fp16(const CacheFormat& format, CodedRows k, CodedRows v) {
  return coded_write_variant<__half>("quantize_write_coded_fp16", format, k, v);
}

}  // namespace kvq::write
