#include <kvq/runtime/api/cache_memory.h>
#include <kvq/runtime/api/handles.h>
#include <kvq/runtime/checks.h>
#include <kvq/runtime/kernels/plan_step/launch.h>

#include <algorithm>
#include <array>
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

kvq_cache::Pools pools_of(const kvq_device_layer& l, const kvq_layer_pools& given, const Windows& windows, int layer) {
  const kvq_cache::Pools pools{static_cast<std::byte*>(given.pages),
                               given.page_stride ? given.page_stride : l.pages.page_bytes(),
                               static_cast<std::byte*>(given.sinks), static_cast<std::byte*>(given.rings)};
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
  return pools;
}

CopyLayer copy_layer(int kind, const kvq_device_layer& l, const kvq_cache::Pools& pools) {
  switch (kind) {
    case KVQ_COPY_PAGES: return {pools.pages, pools.page_stride, pools.pages ? l.pages.page_bytes() : 0};
    case KVQ_COPY_SINKS: return {pools.sinks, l.windows.sinks.slot_bytes(), l.windows.sinks.slot_bytes()};
    default: return {pools.rings, l.windows.rings.slot_bytes(), l.windows.rings.slot_bytes()};
  }
}

/// Everything of a copy but its entries. @param table  [L] the layers, on the host  @param on_device  where they go
CopyParams copy_params(int kind, const kvq_cache& cache, const kvq_cache_options& o, std::vector<CopyLayer>& table,
                       const CopyLayer* on_device) {
  CopyParams p;
  p.num_layers = static_cast<int>(cache.pools.size());
  p.layers = on_device;
  for (std::size_t i = 0; i < cache.pools.size(); ++i) {
    CopyLayer layer = copy_layer(kind, cache.model->layers[i], cache.pools[i]);
    layer.buffer_offset = p.buffer_bytes;
    p.buffer_bytes += layer.bytes;
    p.most_bytes = std::max(p.most_bytes, layer.bytes);
    table.push_back(layer);
  }
  const bool rings = kind == KVQ_COPY_RINGS;
  p.num_entries = rings ? o.num_ring_slots : kind == KVQ_COPY_SINKS ? o.num_sink_slots : o.num_pages;
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
  for (const int kind : kCopyKinds) {
    const CopyLayer* own = layers + table.size();
    cache.copies[kind] = copy_params(kind, cache, o, table, own);
  }
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
      made->pools.push_back(
          pools_of(model.layers[static_cast<std::size_t>(i)], given, model.windows, model.first_layer + i));
    }
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
  CopyParams p = cache->copies[a.kind];
  p.count = a.count, p.from = a.from, p.to = a.to, p.buffer = static_cast<std::byte*>(a.buffer);
  p.sequence_ids = a.sequence_ids;
  if (a.count > 0 && p.most_bytes == 0)
    return Status::fail(StatusCode::invalid_argument, "copy: the cache has no %s",
                        a.kind == KVQ_COPY_SINKS ? "sinks" : "rings");
  if (const Status status = check_copy(p); !status.ok()) return status;
  return run_copy(p, stream);
}

}  // namespace

kvq_status kvq_copy_bytes(const kvq_cache* cache, std::int32_t kind, size_t* bytes, kvq_error* error) {
  return guarded(error, [&] {
    const kvq_cache& c = required(cache, "cache");
    raise(check_kind(kind));
    required(bytes, "bytes") = static_cast<std::size_t>(c.copies[kind].buffer_bytes);
  });
}

kvq_status kvq_copy_run(const kvq_cache* cache, const kvq_copy_args* args, kvq_stream stream, kvq_error* error) {
  return done(error, copy(cache, args, stream));
}
