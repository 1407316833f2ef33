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

kvq_status kvq_cache_demote_kernel(const kvq_cache* cache, std::int32_t layer, kvq_kernel_info* info,
                                   kvq_error* error) {
  return guarded(error, [&] {
    const kvq_device_model& model = *required(cache, "cache").model;
    const auto count = static_cast<std::int64_t>(model.layers.size()), i = std::int64_t{layer} - model.first_layer;
    if (i < 0 || i >= count)
      throw Error{ErrorKind::usage, fmt::format("layer: expected {} to {}, found {}", model.first_layer,
                                                model.first_layer + count - 1, layer)};
    if (model.windows.recent_tokens == 0)
      throw Error{ErrorKind::unsupported,
                  fmt::format("cache: layer {}: recent_tokens is 0; tokens are demoted from a recent window", layer)};
    tell(choose_demote(model.layers[static_cast<std::size_t>(i)].key), info);
  });
}

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
