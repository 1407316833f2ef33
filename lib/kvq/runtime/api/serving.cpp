#include <kvq/runtime/api/handles.h>

#include <kvq/artifact/artifact.h>
#include <kvq/plan/serving.h>
#include <kvq/runtime/kernel_choice.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

using namespace kvq;
using namespace kvq::abi;

namespace {

template <std::size_t kSize>
void copy_text(const std::string& text, char (&to)[kSize]) {
  std::memcpy(to, text.data(), std::min(text.size(), kSize - 1));
}

/// The kernels that this library has for a layer that served_by() takes, which knows the kernels of all builds.
kvq_layer_serving layer_serving(const LayerPlan& plan, bool bf16) {
  kvq_layer_serving to{};
  to.layer = plan.layer;
  const ServedBy served = served_by(plan, bf16 ? Activation::bf16 : Activation::fp16);
  if (!served.is_served()) {
    std::vector<std::string> reasons;
    for (const PageFault& fault : served.refused)
      reasons.push_back(fmt::format("{}: {}", name(fault.side), fault.text()));
    copy_text(served.refused.empty() ? served.no_kernel : fmt::format("{}", fmt::join(reasons, "; ")), to.message);
    return to;
  }
  copy_text(cache_format_name(plan), to.format);
  const KernelKey key = kernel_key(plan, page_layout_of(plan, kTileTokens), bf16);
  const auto kind = [](bool tuned) { return std::int32_t{tuned ? KVQ_SERVED_TUNED : KVQ_SERVED_GENERIC}; };
  const DequantizeVariant rows = choose_dequantize(key);
  to.kernels[KVQ_KERNEL_DECODE] = kind(choose_decode(key).tuned);
  to.kernels[KVQ_KERNEL_WRITE] = kind(choose_write(key).tuned);
  to.kernels[KVQ_KERNEL_DEQUANTIZE] = kind(rows.tuned);
  if (served.by(KernelVerb::prefill) != KernelKind::none)
    to.kernels[KVQ_KERNEL_PREFILL] = kind(choose_prefill(rows).tuned);
  to.served = to.kernels[KVQ_KERNEL_DECODE];
  return to;
}

}  // namespace

kvq_status kvq_artifact_serving(const char* path, std::int32_t activation, kvq_layer_serving* layers,
                                std::int32_t capacity, std::int32_t* count, kvq_error* error) {
  return guarded(error, [&] {
    required(path, "path");
    if (activation != KVQ_BF16 && activation != KVQ_FP16)
      throw Error{ErrorKind::usage, fmt::format("serving: activation: expected 0 or 1, found {}", activation)};
    if (capacity < 0 || (capacity > 0 && !layers))
      throw Error{ErrorKind::usage, fmt::format("serving: {} layers at null", capacity)};
    const Artifact artifact = load_artifact(path);
    const std::size_t stride = capacity > 0 ? layers->struct_size : 0;
    for (std::size_t i = 0; i < std::min(artifact.layers.size(), static_cast<std::size_t>(capacity)); ++i) {
      auto* to = reinterpret_cast<kvq_layer_serving*>(reinterpret_cast<unsigned char*>(layers) + i * stride);
      to->struct_size = stride;
      raise(write_struct(layer_serving(artifact.layers[i], activation == KVQ_BF16), to, "layers"));
    }
    if (count) *count = static_cast<std::int32_t>(artifact.layers.size());
  });
}
