#include <kvq/runtime/kernels/quantize_write/codebook.cuh>

namespace kvq::write {

WriteVariant codebook_write_fp16(const CacheFormat& format, int k_bits, int v_bits) {
  return codebook_write_variant<__half>("quantize_write_codebook_fp16", format, k_bits, v_bits);
}

}  // namespace kvq::write
