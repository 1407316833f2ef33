#include <kvq/runtime.h>
#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/runtime/kernels/prefill/variant.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>

namespace {

template <typename Rows>
const char* name_of(const Rows& rows, std::int32_t index) {
  return index >= 0 && static_cast<std::size_t>(index) < rows.size() ? rows[static_cast<std::size_t>(index)]->name
                                                                     : nullptr;
}

}  // namespace

const kvq_version_info* kvq_version() {
  static constexpr kvq_version_info kVersion{KVQ_ABI_VERSION, KVQ_VERSION};
  return &kVersion;
}

const char* kvq_status_string(std::int32_t status) {
  switch (status) {
    case KVQ_OK: return "ok";
    case KVQ_INVALID_ARGUMENT: return "invalid argument";
    case KVQ_UNSUPPORTED: return "unsupported";
    case KVQ_MISMATCH: return "mismatch";
    case KVQ_IO: return "io";
    case KVQ_CUDA: return "cuda";
    case KVQ_INTERNAL: return "internal";
    default: return "unknown status";
  }
}

const char* kvq_kernel_name(std::int32_t kernel, std::int32_t index) {
  switch (kernel) {
    case KVQ_KERNEL_DECODE: return name_of(kvq::decode_variants(), index);
    case KVQ_KERNEL_WRITE: return name_of(kvq::write_variants(), index);
    case KVQ_KERNEL_DEQUANTIZE: return name_of(kvq::dequantize_variants(), index);
    case KVQ_KERNEL_PREFILL: return name_of(kvq::prefill_variants(), index);
    default: return nullptr;
  }
}
