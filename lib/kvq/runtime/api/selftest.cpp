#include <kvq/runtime/api/handles.h>
#include <kvq/runtime/device_memory.h>
#include <kvq/runtime/selftest.h>

#include <algorithm>

using namespace kvq;
using namespace kvq::abi;

namespace {

kvq_selftest_layer c_result(const SelftestLayer& from) {
  kvq_selftest_layer to{};
  to.layer = from.layer;
  to.status = static_cast<std::int32_t>(from.status());
  to.write_status = static_cast<std::int32_t>(from.write), to.decode_status = static_cast<std::int32_t>(from.decode);
  to.rows = from.rows, to.firm_rows = from.firm_rows;
  to.firm_faults = from.firm_faults, to.soft_faults = from.soft_faults;
  to.output_error = from.output_error;
  const std::size_t length = std::min(from.message.size(), sizeof to.message - 1);
  std::memcpy(to.message, from.message.data(), length);
  return to;
}

/// Summary of the layers with one status: the first layer's message and the number of further layers.
std::string summary(const std::vector<SelftestLayer>& results, StatusCode status) {
  std::string text;
  std::int64_t count = 0;
  for (const SelftestLayer& result : results)
    if (result.status() == status && count++ == 0)
      text = fmt::format("self-test: layer {}: {}", result.layer, result.message);
  return count > 1 ? fmt::format("{} (and {} more of {} layers)", text, count - 1, results.size()) : text;
}

}  // namespace

kvq_status kvq_selftest(const kvq_model* model, kvq_selftest_layer* layers, std::int32_t capacity, std::int32_t* count,
                        kvq_stream stream, kvq_error* error) {
  return guarded(error, [&]() -> Status {
    const LoadedModel& m = required(model, "model").model;
    if (capacity < 0 || (capacity > 0 && !layers))
      throw Error{ErrorKind::usage, fmt::format("self-test: {} layers at null", capacity)};
    const std::size_t stride = capacity > 0 ? layers->struct_size : 0;
    DeviceImage unfolded;
    for (const LoadedLayer& layer : m.layers)
      unfolded.add(layer.plan, Folded{}, m.claim.bf16, layer.pages, bit_kernels(layer.key));
    const DeviceMemory image = to_device(unfolded.bytes(), stream);
    std::vector<SelftestLayer> results;
    results.reserve(m.layers.size());
    for (std::size_t i = 0; i < m.layers.size(); ++i)
      results.push_back(selftest(m.layers[i], unfolded.pointers(i, image.get()), stream));
    for (std::size_t i = 0; i < std::min(results.size(), static_cast<std::size_t>(capacity)); ++i) {
      auto* to = reinterpret_cast<kvq_selftest_layer*>(reinterpret_cast<unsigned char*>(layers) + i * stride);
      to->struct_size = stride;
      raise(write_struct(c_result(results[i]), to, "layers"));
    }
    if (count) *count = static_cast<std::int32_t>(results.size());
    for (const StatusCode status : {StatusCode::mismatch, StatusCode::unsupported})
      if (const std::string text = summary(results, status); !text.empty())
        return Status::fail(status, "%s", text.c_str());
    return {};
  });
}
