#include <kvq/runtime/kernels/quantize_write/codebook.cuh>

namespace kvq::write {

WriteVariant codebook_write_bf16(const CacheFormat& format, int k_bits, int v_bits) {
  return codebook_write_variant<__nv_bfloat16>("quantize_write_codebook_bf16", format, k_bits, v_bits);
}

}  // namespace kvq::write

namespace kvq {

WriteVariant codebook_write(const CacheFormat& format, int k_bits, int v_bits, bool bf16) {
  return bf16 ? write::codebook_write_bf16(format, k_bits, v_bits) : write::codebook_write_fp16(format, k_bits, v_bits);
}

}  // namespace kvq
