#include <kvq/runtime/api/handles.h>

using namespace kvq;
using namespace kvq::abi;

std::size_t kvq_decode_plan::workspace_bytes() const {
  return decode_workspace_bytes(launch, static_cast<std::size_t>(max_batch) * static_cast<std::size_t>(num_kv_heads));
}

namespace {

Status run_decode(const kvq_decode_plan& plan, const kvq_cache* cache, int layer, const kvq_decode_args* args,
                  kvq_stream stream) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  kvq_decode_args a;
  if (const Status status = read_struct(args, a, "args"); !status.ok()) return status;
  CacheLayer found;
  if (const Status status = find_layer("decode", cache, layer, plan.key, found); !status.ok()) return status;
  const auto& [l, pools] = found;
  const DeviceModel& model = *cache->model;
  if (l->num_kv_heads != plan.num_kv_heads)
    return Status::fail(kBad, "decode: layer %d has %d KV heads, the layer of the plan %d", layer, l->num_kv_heads,
                        plan.num_kv_heads);
  if (model.device != plan.device)
    return Status::fail(kBad, "decode: the plan was made on device %d, the cache is on %d", plan.device, model.device);
  DecodeParams p;
  p.cache = paged_cache_view(*cache, found, layer);
  if (const Status status = read_sequences("decode", a.sequences, plan.max_batch, p.cache); !status.ok()) return status;
  AttentionOptions options;
  if (const Status status = attention_options("decode", *l, a.softmax_scale, a.sliding_window, options); !status.ok())
    return status;
  if (p.cache.batch > 0 && (!a.workspace || !aligned(a.workspace, 256) || a.workspace_bytes < plan.workspace_bytes()))
    return Status::fail(kBad, "decode: expected a workspace of %zu bytes, aligned to 256, found %zu bytes",
                        plan.workspace_bytes(), a.workspace_bytes);
  if (l->center_in_o_proj && a.sink_logits)
    return Status::fail(StatusCode::unsupported,
                        "decode: layer %d: sink_logits with values whose center is folded into o_proj, which takes "
                        "weights to sum to 1; supported without a center, or not folded",
                        layer);

  const std::int64_t heads = l->num_q_heads;
  p.num_q_heads = l->num_q_heads;
  p.softmax_scale = options.softmax_scale, p.sliding_window = options.sliding_window;
  p.q = a.q, p.q_stride = a.q_stride ? a.q_stride : heads * l->pages.k.head_dim;
  p.out = a.out, p.out_stride = a.out_stride ? a.out_stride : heads * l->pages.v.head_dim;
  p.lse = a.lse_natural;
  p.cache.center_k = l->pointers.center_k;  // of folded keys, too: it enters lse and sink logits
  p.sink_logits = a.sink_logits;
  p.workspace = a.workspace;
  if (const Status status = check_decode(plan.variant, p); !status.ok()) return status;
  return plan.variant.run(plan.launch, p, stream);
}

}  // namespace

kvq_status kvq_decode_plan_create(const kvq_model* model, std::int32_t layer, const kvq_decode_options* options,
                                  kvq_decode_plan** plan, kvq_error* error) {
  return guarded(error, [&] {
    const LoadedLayer& l = layer_of(model, layer);
    required(plan, "plan");
    kvq_decode_options o;
    raise(read_struct(options, o, "options"));
    if (o.max_batch < 1)
      throw Error{ErrorKind::usage, fmt::format("decode: max_batch: expected 1 or more, found {}", o.max_batch)};
    raise(check_plan_flags("decode", o.flags));
    kvq_decode_plan made{.variant = {}, .key = l.key, .num_kv_heads = l.heads.num_kv, .max_batch = o.max_batch};
    made.variant = choose_decode(made.key);
    raise(cuda_status(cudaGetDevice(&made.device), "decode: plan"));
    raise(made.variant.plan(made.launch));
    if (o.flags & KVQ_PLAN_NO_OVERLAP) made.launch.overlapping = false;
    *plan = new kvq_decode_plan{made};
  });
}

void kvq_decode_plan_destroy(kvq_decode_plan* plan) { delete plan; }

kvq_status kvq_decode_workspace_bytes(const kvq_decode_plan* plan, size_t* bytes, kvq_error* error) {
  return guarded(error, [&] { required(bytes, "bytes") = required(plan, "plan").workspace_bytes(); });
}

kvq_status kvq_decode_run(const kvq_decode_plan* plan, const kvq_cache* cache, std::int32_t layer,
                          const kvq_decode_args* args, kvq_stream stream, kvq_error* error) {
  if (!plan) return done(error, Status::fail(StatusCode::invalid_argument, "decode: plan must not be null"));
  return done(error, run_decode(*plan, cache, layer, args, stream));
}
