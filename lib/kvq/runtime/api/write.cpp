#include <kvq/runtime/api/handles.h>

using namespace kvq;
using namespace kvq::abi;

Status kvq::abi::write_params(const kvq_plan& plan, const kvq_cache* cache, int layer, const kvq_write_args& a,
                              CacheLayer& found, WriteParams& p) {
  if (const Status status = find_layer("write", plan, cache, layer, found); !status.ok()) return status;
  const auto& [l, pools, kernels] = found;
  const Windows& windows = cache->model->windows;
  if (windows != Windows{} && a.num_tokens > 0 && !a.window_mapping)
    return Status::fail(StatusCode::invalid_argument, "write: %d sink and %d recent tokens need a window_mapping",
                        windows.sink_tokens, windows.recent_tokens);
  p.num_tokens = a.num_tokens, p.num_kv_heads = l->num_kv_heads;
  p.k = l->pointers.write_k, p.v = l->pointers.write_v;
  p.k.x = a.k, p.v.x = a.v;
  p.k.token_stride = a.k_token_stride ? a.k_token_stride : std::int64_t{l->num_kv_heads} * l->pages.k.head_dim;
  p.v.token_stride = a.v_token_stride ? a.v_token_stride : std::int64_t{l->num_kv_heads} * l->pages.v.head_dim;
  p.slot_mapping = a.slot_mapping;
  p.pages = pools->pages, p.page_stride = pools->page_stride;
  p.page_shift = page_shift(l->pages);
  if (windows != Windows{}) p.window_mapping = a.window_mapping;
  p.sinks = pools->sinks, p.sink_layout = l->windows.sinks;
  p.rings = pools->rings, p.ring_layout = l->windows.rings;
  if (a.workspace_bytes > 0 && (!a.workspace || !aligned(a.workspace, 256)))
    return Status::fail(StatusCode::invalid_argument,
                        "write: expected a workspace of %zu bytes, aligned to 256, or none", a.workspace_bytes);
  p.workspace = static_cast<std::byte*>(a.workspace), p.workspace_bytes = a.workspace_bytes;
  p.extents = extents_of(*cache, *pools), p.faults = cache->faults, p.layer = layer;
  return check_write(kernels->write, p);
}

namespace {

Status write(const kvq_plan* plan, const kvq_cache* cache, int layer, const kvq_write_args* args, kvq_stream stream) {
  if (!plan) return Status::fail(StatusCode::invalid_argument, "write: plan must not be null");
  kvq_write_args a;
  if (const Status status = read_struct(args, a, "args"); !status.ok()) return status;
  CacheLayer found;
  WriteParams p;
  if (const Status status = write_params(*plan, cache, layer, a, found, p); !status.ok()) return status;
  return found.kernels->write.run(found.kernels->write_launch, p, stream);
}

}  // namespace

kvq_status kvq_write_run(const kvq_plan* plan, const kvq_cache* cache, std::int32_t layer, const kvq_write_args* args,
                         kvq_stream stream, kvq_error* error) {
  return done(error, write(plan, cache, layer, args, stream));
}
