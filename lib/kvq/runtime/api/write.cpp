#include <kvq/runtime/api/handles.h>

using namespace kvq;
using namespace kvq::abi;

kvq_status kvq_write_plan_create(const kvq_model* model, std::int32_t layer, const kvq_write_options* options,
                                 kvq_write_plan** plan, kvq_error* error) {
  return guarded(error, [&] {
    const LoadedLayer& l = layer_of(model, layer);
    required(plan, "plan");
    kvq_write_options o{};
    if (options) raise(read_struct(options, o, "options"));
    raise(check_plan_flags("write", o.flags));
    kvq_write_plan made;
    made.key = l.key;
    made.variant = choose_write(l.key);
    raise(cuda_status(cudaGetDevice(&made.device), "write: plan"));
    raise(made.variant.plan(made.launch));
    if (o.flags & KVQ_PLAN_NO_OVERLAP) made.launch.overlapping = false;
    *plan = new kvq_write_plan{made};
  });
}

void kvq_write_plan_destroy(kvq_write_plan* plan) { delete plan; }

namespace {

Status write(const kvq_write_plan& plan, const kvq_cache* cache, int layer, const kvq_write_args* args,
             kvq_stream stream) {
  kvq_write_args a;
  if (const Status status = read_struct(args, a, "args"); !status.ok()) return status;
  CacheLayer found;
  if (const Status status = find_layer("write", cache, layer, plan.key, found); !status.ok()) return status;
  const auto& [l, pools] = found;
  if (cache->model->device != plan.device)
    return Status::fail(StatusCode::invalid_argument, "write: the plan was made on device %d, the cache is on %d",
                        plan.device, cache->model->device);
  const Windows& windows = cache->model->windows;
  if (windows != Windows{} && a.num_tokens > 0 && !a.window_mapping)
    return Status::fail(StatusCode::invalid_argument, "write: %d sink and %d recent tokens need a window_mapping",
                        windows.sink_tokens, windows.recent_tokens);
  WriteParams p;
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
  p.extents = cache->extents, p.faults = cache->faults, p.layer = layer;
  if (const Status status = check_write(plan.variant, p); !status.ok()) return status;
  return plan.variant.run(plan.launch, p, stream);
}

}  // namespace

kvq_status kvq_write_run(const kvq_write_plan* plan, const kvq_cache* cache, std::int32_t layer,
                         const kvq_write_args* args, kvq_stream stream, kvq_error* error) {
  if (!plan) return done(error, Status::fail(StatusCode::invalid_argument, "write: plan must not be null"));
  return done(error, write(*plan, cache, layer, args, stream));
}
