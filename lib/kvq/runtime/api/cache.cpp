#include <kvq/runtime/api/cache_memory.h>
#include <kvq/runtime/api/handles.h>
#include <kvq/runtime/checks.h>
#include <kvq/runtime/kernels/plan_step/launch.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>

using namespace kvq;
using namespace kvq::abi;

namespace {

constexpr std::array kCopyKinds = {KVQ_COPY_PAGES, KVQ_COPY_SINKS, KVQ_COPY_RINGS};
static_assert(kCopyKinds.size() == kNumCopyKinds);

kvq_cache_options options_of(const DeviceModel& model, const kvq_cache_options* options) {
  kvq_cache_options o;
  raise(read_struct(options, o, "options"));
  const auto fail = [](const std::string& what) { throw Error{ErrorKind::usage, "cache: " + what}; };
  if (o.flags & ~std::uint32_t{KVQ_CACHE_UNCHECKED}) fail(fmt::format("flags: unknown bits in {:#x}", o.flags));
  if (o.num_pages < 1) fail(fmt::format("num_pages: expected 1 or more, found {}", o.num_pages));
  const auto check = [&](const char* name, std::int32_t slots, int tokens, const char* which) {
    if (slots < 0 || (tokens > 0) != (slots > 0))
      fail(fmt::format("{}: expected {} for {} {} tokens, found {}", name, tokens > 0 ? "1 or more" : "0", tokens,
                       which, slots));
  };
  check("num_sink_slots", o.num_sink_slots, model.windows.sink_tokens, "sink");
  check("num_ring_slots", o.num_ring_slots, model.windows.recent_tokens, "recent");
  return o;
}

kvq_cache::Pools pools_of(const DeviceModel& model, std::int32_t index, const kvq_layer_pools& given,
                          const kvq_cache_options& o) {
  const kvq_device_layer& l = model.layers[static_cast<std::size_t>(index)];
  const Windows& windows = model.windows;
  const int layer = model.first_layer + index, num_layers = static_cast<int>(model.layers.size());
  const kvq_cache::Pools pools{static_cast<std::byte*>(given.pages),
                               given.page_stride ? given.page_stride : l.pages.page_bytes(),
                               static_cast<std::byte*>(given.sinks),
                               static_cast<std::byte*>(given.rings),
                               given.group,
                               !given.pages      ? 0
                               : given.num_pages ? given.num_pages
                                                 : o.num_pages};
  const auto fail = [&](const std::string& what) {
    throw Error{ErrorKind::usage, fmt::format("cache: layer {}: {}", layer, what)};
  };
  if (!pools.pages && (l.sliding_window == 0 || l.sliding_window > windows.recent_tokens))
    fail(fmt::format("pages must be there, unless a sliding window of at most recent_tokens, {}, hides them; found {}",
                     windows.recent_tokens, l.sliding_window));
  if (!aligned(pools.pages, 16)) fail("pages must be aligned to 16 bytes");
  if (pools.page_stride % 16 != 0 || pools.page_stride < l.pages.page_bytes())
    fail(fmt::format("page_stride: expected a multiple of 16, {} or more, found {}", l.pages.page_bytes(),
                     pools.page_stride));
  if (pools.page_stride > kMostWriteStride)
    fail(fmt::format("page_stride: expected less than 2^32 bytes, found {}", pools.page_stride));
  if (windows.sink_tokens > 0 && (!pools.sinks || !aligned(pools.sinks, 16)))
    fail(fmt::format("{} sink tokens need sinks, aligned to 16 bytes", windows.sink_tokens));
  if (windows.recent_tokens > 0 && (!pools.rings || !aligned(pools.rings, 16)))
    fail(fmt::format("{} recent tokens need rings, aligned to 16 bytes", windows.recent_tokens));
  if (given.group < 0 || given.group >= num_layers)
    fail(fmt::format("group: expected 0 to {}, found {}", num_layers - 1, given.group));
  if (given.num_pages < 0 || given.num_pages > o.num_pages)
    fail(fmt::format("num_pages: expected 0 to {}, found {}", o.num_pages, given.num_pages));
  return pools;
}

/// A page has one number in all layers of a group, so their pools have one size.
void check_groups(const kvq_cache& cache) {
  std::map<int, int> num_pages;
  for (std::size_t i = 0; i < cache.pools.size(); ++i) {
    const kvq_cache::Pools& pools = cache.pools[i];
    if (!pools.pages) continue;
    const int expected = num_pages.try_emplace(pools.group, pools.num_pages).first->second;
    if (pools.num_pages != expected)
      throw Error{ErrorKind::usage,
                  fmt::format("cache: layer {}: num_pages: expected {} as in layers of group {} before, found {}",
                              cache.model->first_layer + static_cast<int>(i), expected, pools.group, pools.num_pages)};
  }
}

CopyLayer copy_layer(int kind, const kvq_device_layer& l, const kvq_cache::Pools& pools) {
  switch (kind) {
    case KVQ_COPY_PAGES: return {pools.pages, pools.page_stride, pools.pages ? l.pages.page_bytes() : 0};
    case KVQ_COPY_SINKS: return {pools.sinks, l.windows.sinks.slot_bytes(), l.windows.sinks.slot_bytes()};
    default: return {pools.rings, l.windows.rings.slot_bytes(), l.windows.rings.slot_bytes()};
  }
}

/// Everything of a copy but its entries, of all layers or, of pages, those of one group.
/// @param table  the layers, on the host, appended  @param on_device  where the table goes
CopyParams copy_params(int kind, int group, const kvq_cache& cache, const kvq_cache_options& o,
                       std::vector<CopyLayer>& table, const CopyLayer* on_device) {
  CopyParams p;
  p.layers = on_device + table.size();
  int num_pages = 0;
  for (std::size_t i = 0; i < cache.pools.size(); ++i) {
    if (kind == KVQ_COPY_PAGES && cache.pools[i].group != group) continue;
    ++p.num_layers;
    num_pages = std::max(num_pages, cache.pools[i].num_pages);
    CopyLayer layer = copy_layer(kind, cache.model->layers[i], cache.pools[i]);
    layer.buffer_offset = p.buffer_bytes;
    p.buffer_bytes += layer.bytes;
    p.most_bytes = std::max(p.most_bytes, layer.bytes);
    table.push_back(layer);
  }
  const bool rings = kind == KVQ_COPY_RINGS;
  p.num_entries = rings ? o.num_ring_slots : kind == KVQ_COPY_SINKS ? o.num_sink_slots : num_pages;
  p.fault_code = rings ? FaultCode::ring_slot : kind == KVQ_COPY_SINKS ? FaultCode::sink_slot : FaultCode::page;
  p.faults = cache.faults;
  if (rings) {
    p.ring_states = cache.ring_states;
    if (p.buffer_bytes > 0) p.buffer_bytes += static_cast<std::int64_t>(sizeof(RingState));
  }
  return p;
}

/// Lays out the cache's device memory and fills it.
void fill_memory(kvq_cache& cache, const kvq_cache_options& o, void* memory, kvq_stream stream) {
  const CacheMemory layout(cache.model->layers.size(), o);
  auto* at = static_cast<std::byte*>(memory);
  cache.faults = reinterpret_cast<FaultRecord*>(at + layout.faults);
  cache.ring_states = reinterpret_cast<RingState*>(at + layout.ring_states);
  std::vector<CopyLayer> table;
  const auto* layers = reinterpret_cast<const CopyLayer*>(at + layout.copies);
  int groups = 1;
  for (const kvq_cache::Pools& pools : cache.pools) groups = std::max(groups, pools.group + 1);
  for (const int kind : kCopyKinds)
    for (int group = 0; group < (kind == KVQ_COPY_PAGES ? groups : 1); ++group)
      cache.copies[kind].push_back(copy_params(kind, group, cache, o, table, layers));
  const FaultRecord no_fault;
  raise(cuda_status(cudaMemsetAsync(memory, 0, layout.total, stream), "cache"));
  raise(
      cuda_status(cudaMemcpyAsync(cache.faults, &no_fault, sizeof no_fault, cudaMemcpyHostToDevice, stream), "cache"));
  raise(cuda_status(cudaMemcpyAsync(at + layout.copies, table.data(), table.size() * sizeof(CopyLayer),
                                    cudaMemcpyHostToDevice, stream),
                    "cache"));
  raise(cuda_status(cudaStreamSynchronize(stream), "cache"));
}

}  // namespace

kvq_status kvq_cache_device_bytes(const kvq_device_model* device_model, const kvq_cache_options* options, size_t* bytes,
                                  kvq_error* error) {
  return guarded(error, [&] {
    const DeviceModel& model = *required(device_model, "device_model").data;
    required(bytes, "bytes") = CacheMemory(model.layers.size(), options_of(model, options)).total;
  });
}

kvq_status kvq_cache_create(const kvq_device_model* device_model, const kvq_cache_options* options,
                            const kvq_layer_pools* pools, std::int32_t count, void* memory, size_t bytes,
                            kvq_stream stream, kvq_cache** cache, kvq_error* error) {
  return guarded(error, [&] {
    const auto& data = required(device_model, "device_model").data;
    const DeviceModel& model = *data;
    const kvq_cache_options o = options_of(model, options);
    required(pools, "pools"), required(cache, "cache");
    if (count != static_cast<std::int64_t>(model.layers.size()))
      throw Error{ErrorKind::usage,
                  fmt::format("cache: expected pools of {} layers, found {}", model.layers.size(), count)};
    raise(check_device("cache", model.device, "model"));
    raise(load_plan_step());
    raise(load_copy());
    auto made = std::make_unique<kvq_cache>();
    made->model = data;
    if (!(o.flags & KVQ_CACHE_UNCHECKED)) made->extents = {o.num_pages, o.num_sink_slots, o.num_ring_slots};
    const auto* at = reinterpret_cast<const unsigned char*>(pools);
    for (std::int32_t i = 0; i < count; ++i, at += pools->struct_size) {
      kvq_layer_pools given;
      raise(read_struct(reinterpret_cast<const kvq_layer_pools*>(at), given, "pools"));
      made->pools.push_back(pools_of(model, i, given, o));
    }
    check_groups(*made);
    const std::size_t needed = CacheMemory(model.layers.size(), o).total;
    if (!memory || !aligned(memory, 256) || bytes < needed)
      throw Error{ErrorKind::usage,
                  fmt::format("cache: expected {} bytes of memory, aligned to 256, found {}", needed, bytes)};
    fill_memory(*made, o, memory, stream);
    if (o.flags & KVQ_CACHE_UNCHECKED) made->ring_states = nullptr;
    *cache = made.release();
  });
}

void kvq_cache_destroy(kvq_cache* cache) { delete cache; }

kvq_status kvq_fault_query(const kvq_cache* cache, kvq_fault* fault, kvq_stream stream, kvq_error* error) {
  return guarded(error, [&] {
    const kvq_cache& c = required(cache, "cache");
    raise(check_device("fault", c.model->device, "cache"));
    FaultRecord found;
    raise(write_struct(kvq_fault{}, fault, "fault"));
    raise(cuda_status(cudaMemcpyAsync(&found, c.faults, sizeof found, cudaMemcpyDeviceToHost, stream), "fault"));
    raise(cuda_status(cudaStreamSynchronize(stream), "fault"));
    const FaultRecord none;
    if (found.code != 0) {
      raise(cuda_status(cudaMemcpyAsync(c.faults, &none, sizeof none, cudaMemcpyHostToDevice, stream), "fault"));
      raise(cuda_status(cudaStreamSynchronize(stream), "fault"));
    }
    kvq_fault told{};
    told.code = found.code, told.sequence = found.sequence, told.layer = found.layer, told.value = found.value;
    raise(write_struct(told, fault, "fault"));
  });
}

const char* kvq_fault_string(std::int32_t code) {
  constexpr std::array names = {"none",         "length",     "page",       "sink slot", "ring slot",
                                "foreign ring", "rollback",   "new tokens", "prefix",    "plan",
                                "slot mapping", "window row", "output rows"};
  return code >= 0 && static_cast<std::size_t>(code) < names.size() ? names[static_cast<std::size_t>(code)]
                                                                    : "unknown fault";
}

namespace {

Status check_kind(std::int32_t kind) {
  if (std::find(kCopyKinds.begin(), kCopyKinds.end(), kind) != kCopyKinds.end()) return {};
  return Status::fail(StatusCode::invalid_argument, "copy: kind: expected a kvq_copy_kind, found %d", kind);
}

Status copy(const kvq_cache* cache, const kvq_copy_args* args, kvq_stream stream) {
  kvq_copy_args a;
  if (const Status status = read_struct(args, a, "args"); !status.ok()) return status;
  if (!cache) return Status::fail(StatusCode::invalid_argument, "copy: cache must not be null");
  if (const Status status = check_kind(a.kind); !status.ok()) return status;
  if (const Status status = check_device("copy", cache->model->device, "cache"); !status.ok()) return status;
  const std::vector<CopyParams>& of_kind = cache->copies[a.kind];
  if (a.group < 0 || a.group >= static_cast<std::int64_t>(of_kind.size()))
    return Status::fail(StatusCode::invalid_argument, "copy: group: expected 0 to %d, found %d",
                        static_cast<int>(of_kind.size()) - 1, a.group);
  CopyParams p = of_kind[static_cast<std::size_t>(a.group)];
  p.count = a.count, p.from = a.from, p.to = a.to, p.buffer = static_cast<std::byte*>(a.buffer);
  p.sequence_ids = a.sequence_ids;
  if (a.count > 0 && p.most_bytes == 0)
    return Status::fail(StatusCode::invalid_argument, "copy: the cache has no %s",
                        a.kind == KVQ_COPY_PAGES   ? "pages of this group"
                        : a.kind == KVQ_COPY_SINKS ? "sinks"
                                                   : "rings");
  if (const Status status = check_copy(p); !status.ok()) return status;
  return run_copy(p, stream);
}

}  // namespace

kvq_status kvq_copy_bytes(const kvq_cache* cache, std::int32_t kind, size_t* bytes, kvq_error* error) {
  return guarded(error, [&] {
    const kvq_cache& c = required(cache, "cache");
    raise(check_kind(kind));
    std::size_t& into = required(bytes, "bytes");
    into = static_cast<std::size_t>(c.copies[kind].front().buffer_bytes);
  });
}

kvq_status kvq_copy_run(const kvq_cache* cache, const kvq_copy_args* args, kvq_stream stream, kvq_error* error) {
  return done(error, copy(cache, args, stream));
}
