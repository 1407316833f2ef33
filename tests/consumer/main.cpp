// What an engine in C++ sees of kvq on a machine without a device.
#include <kvq/runtime.hpp>

#include <cstdio>
#include <cstring>

int main() {
  if (kvq_version()->abi_version != KVQ_ABI_VERSION) return 1;
  auto geometry = kvq::runtime::init<kvq_layer_geometry>();
  geometry.num_q_heads = geometry.num_kv_heads = 8, geometry.head_dim = 128;
  auto options = kvq::runtime::init<kvq_model_options>();
  options.num_layers = 2, options.num_geometries = 1, options.geometry = &geometry;
  try {
    kvq::runtime::Model model("no such file", options);
  } catch (const kvq::runtime::Error& error) {
    std::printf("%s: %s\n", kvq_status_string(error.status()), error.what());
    return error.status() == KVQ_IO && std::strstr(error.what(), "no such file") ? 0 : 1;
  }
  return 1;
}
