#include "write_case.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>

namespace kvq::test {

namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

/// A copy of host values on the device; null for none.
template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) {
    if (values.empty()) return;
    check(cudaMalloc(&data_, values.size() * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  T* get() const { return static_cast<T*>(data_); }

 private:
  void* data_ = nullptr;
};

}  // namespace

float from_16_bits(std::uint16_t bits, bool bf16) {
  return bf16 ? __bfloat162float(__ushort_as_bfloat16(bits)) : __half2float(__ushort_as_half(bits));
}
std::uint16_t to_16_bits(float x, bool bf16) {
  return bf16 ? __bfloat16_as_ushort(__float2bfloat16(x)) : __half_as_ushort(__float2half(x));
}

std::vector<std::byte> run_write_case(const WriteVariant& variant, const WriteCase& c,
                                      const std::vector<std::byte>& before) {
  const OnDevice<std::uint16_t> k(c.k), v(c.v);
  const OnDevice<std::int64_t> slots(c.slot_mapping);
  const OnDevice<float> center_k(c.center_k), center_v(c.center_v);
  const OnDevice<std::int8_t> signs(c.signs);
  const OnDevice<std::byte> pages(before);
  WriteParams p;
  p.num_tokens = c.num_tokens, p.num_kv_heads = c.num_kv_heads;
  p.k = {k.get(), std::int64_t{c.num_kv_heads} * variant.k.head_dim, center_k.get(), signs.get(), true, c.order_k,
         c.rule_k};
  p.v = {v.get(), std::int64_t{c.num_kv_heads} * variant.v.head_dim, center_v.get(), signs.get(), true, c.order_v,
         c.rule_v};
  p.slot_mapping = slots.get(), p.pages = pages.get();
  p.page_shift = c.page_size == 64 ? 6 : c.page_size == 32 ? 5 : 4;
  p.page_stride = static_cast<std::int64_t>(before.size()) / c.num_pages;
  Status status = check_write(variant, p);
  if (status.ok()) status = variant.run(p, nullptr);
  if (!status.ok()) throw std::runtime_error(status.message());
  check(cudaDeviceSynchronize(), "quantize_write");
  std::vector<std::byte> after(before.size());
  check(cudaMemcpy(after.data(), pages.get(), after.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return after;
}

}  // namespace kvq::test
