#include <kvq/runtime/api/handles.h>

using namespace kvq;
using namespace kvq::abi;

namespace {

template <typename Variant>
void tell(const Variant& variant, kvq_kernel_info* info) {
  auto told = kvq_kernel_info{};
  told.name = variant.name, told.tuned = variant.tuned;
  raise(write_struct(told, info, "info"));
}

template <typename Plan>
kvq_status plan_kernel(const Plan* plan, kvq_kernel_info* info, kvq_error* error) {
  return guarded(error, [&] { tell(required(plan, "plan").variant, info); });
}

}  // namespace

kvq_status kvq_write_plan_kernel(const kvq_write_plan* plan, kvq_kernel_info* info, kvq_error* error) {
  return plan_kernel(plan, info, error);
}
kvq_status kvq_decode_plan_kernel(const kvq_decode_plan* plan, kvq_kernel_info* info, kvq_error* error) {
  return plan_kernel(plan, info, error);
}
kvq_status kvq_prefill_plan_kernel(const kvq_prefill_plan* plan, kvq_kernel_info* info, kvq_error* error) {
  return plan_kernel(plan, info, error);
}
kvq_status kvq_dequantize_plan_kernel(const kvq_dequantize_plan* plan, kvq_kernel_info* info, kvq_error* error) {
  return plan_kernel(plan, info, error);
}
