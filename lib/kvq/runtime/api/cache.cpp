#include <kvq/runtime/api/handles.h>
#include <kvq/runtime/checks.h>
#include <kvq/runtime/kernels/plan_step/launch.h>

#include <algorithm>
#include <memory>

using namespace kvq;
using namespace kvq::abi;

namespace {

std::size_t device_bytes(const kvq_device_model& model) {
  return model.windows.recent_tokens > 0 ? model.layers.size() * sizeof(DemoteLayer) : 0;
}

kvq_cache::Pools pools_of(const kvq_device_layer& l, const kvq_layer_pools& given, const Windows& windows, int layer) {
  const kvq_cache::Pools pools{static_cast<std::byte*>(given.pages),
                               given.page_stride ? given.page_stride : l.pages.page_bytes(),
                               static_cast<std::byte*>(given.windows)};
  const auto fail = [&](const std::string& what) {
    throw Error{ErrorKind::usage, fmt::format("cache: layer {}: {}", layer, what)};
  };
  if (!pools.pages || !aligned(pools.pages, 16)) fail("pages must be there, aligned to 16 bytes");
  if (pools.page_stride % 16 != 0 || pools.page_stride < l.pages.page_bytes())
    fail(fmt::format("page_stride: expected a multiple of 16, {} or more, found {}", l.pages.page_bytes(),
                     pools.page_stride));
  if (pools.page_stride > kMostWriteStride)
    fail(fmt::format("page_stride: expected less than 2^32 bytes, found {}", pools.page_stride));
  if (windows != Windows{} && (!pools.windows || !aligned(pools.windows, 16)))
    fail(fmt::format("{} sink and {} recent tokens need windows, aligned to 16 bytes", windows.sink_tokens,
                     windows.recent_tokens));
  return pools;
}

bool demoted_together(const kvq_demote_group& group, const kvq_device_layer& l, const kvq_cache::Pools& pools,
                      const DemoteVariant& variant) {
  return same_format(group.variant.format(), variant.format()) && group.params.num_kv_heads == l.num_kv_heads &&
         group.params.page_stride == pools.page_stride;
}

/// Groups layers that share a demote launch; each group is contiguous in `table`.
std::vector<kvq_demote_group> demote_groups(const kvq_device_model& model, const std::vector<kvq_cache::Pools>& pools,
                                            std::vector<DemoteLayer>& table) {
  std::vector<kvq_demote_group> groups;
  std::vector<std::vector<DemoteLayer>> members;
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    const kvq_device_layer& l = model.layers[i];
    const DemoteVariant variant = choose_demote(l.key);
    const auto group = std::find_if(groups.begin(), groups.end(),
                                    [&](const auto& g) { return demoted_together(g, l, pools[i], variant); });
    const auto place = static_cast<std::size_t>(group - groups.begin());
    if (group == groups.end()) {
      kvq_demote_group made{.variant = variant, .params = {}};
      made.params.num_kv_heads = l.num_kv_heads;
      made.params.window_layout = l.windows;
      made.params.page_shift = page_shift(l.pages), made.params.page_stride = pools[i].page_stride;
      groups.push_back(made);
      members.emplace_back();
    }
    members[place].push_back({pools[i].windows, pools[i].pages, l.pointers.write_k, l.pointers.write_v});
    raise(check_demote_layer(variant, members[place].back()));
    raise(variant.load());
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    groups[g].params.num_layers = static_cast<int>(members[g].size());
    table.insert(table.end(), members[g].begin(), members[g].end());
  }
  return groups;
}

}  // namespace

kvq_status kvq_cache_device_bytes(const kvq_device_model* device_model, size_t* bytes, kvq_error* error) {
  return guarded(error, [&] { required(bytes, "bytes") = device_bytes(required(device_model, "device_model")); });
}

kvq_status kvq_cache_create(const kvq_device_model* device_model, const kvq_layer_pools* pools, std::int32_t count,
                            void* memory, size_t bytes, kvq_stream stream, kvq_cache** cache, kvq_error* error) {
  return guarded(error, [&] {
    const kvq_device_model& model = required(device_model, "device_model");
    required(pools, "pools"), required(cache, "cache");
    if (count != static_cast<std::int64_t>(model.layers.size()))
      throw Error{ErrorKind::usage,
                  fmt::format("cache: expected pools of {} layers, found {}", model.layers.size(), count)};
    raise(check_device("cache", model.device, "model"));
    raise(load_plan_step());
    auto made = std::make_unique<kvq_cache>();
    made->model = &model;
    const auto* at = reinterpret_cast<const unsigned char*>(pools);
    for (std::int32_t i = 0; i < count; ++i, at += pools->struct_size) {
      kvq_layer_pools given;
      raise(read_struct(reinterpret_cast<const kvq_layer_pools*>(at), given, "pools"));
      made->pools.push_back(
          pools_of(model.layers[static_cast<std::size_t>(i)], given, model.windows, model.first_layer + i));
    }
    if (model.windows.recent_tokens > 0) {
      if (!memory || !aligned(memory, 256) || bytes < device_bytes(model))
        throw Error{ErrorKind::usage, fmt::format("cache: expected {} bytes of memory, aligned to 256, found {}",
                                                  device_bytes(model), bytes)};
      std::vector<DemoteLayer> table;
      made->demote_groups = demote_groups(model, made->pools, table);
      raise(cuda_status(cudaMemcpyAsync(memory, table.data(), device_bytes(model), cudaMemcpyHostToDevice, stream),
                        "cache"));
      raise(cuda_status(cudaStreamSynchronize(stream), "cache"));
      const auto* next = static_cast<const DemoteLayer*>(memory);
      for (kvq_demote_group& group : made->demote_groups) {
        group.params.layers = next;
        next += group.params.num_layers;
      }
    }
    *cache = made.release();
  });
}

void kvq_cache_destroy(kvq_cache* cache) { delete cache; }
