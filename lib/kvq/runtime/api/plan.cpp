#include <kvq/runtime/api/handles.h>

#include <algorithm>

using namespace kvq;
using namespace kvq::abi;

namespace {

using Kernels = kvq_plan::Kernels;

kvq_plan_options options_of(const kvq_plan_options* options) {
  kvq_plan_options o{};
  if (options) raise(read_struct(options, o, "options"));
  raise(check_plan_options(o));
  return o;
}

/// Runs `work`; what it throws names the layer.
template <typename Work>
void for_layer(int layer, Work&& work) {
  const std::string where = fmt::format("plan: layer {}: ", layer);
  try {
    work();
  } catch (const Error& e) {
    throw Error{e.kind(), where + e.what()};
  } catch (const StatusError& e) {
    raise(Status::fail(e.status.code(), "%s%s", where.c_str(), e.status.message()));
  }
}

int new_tokens(const kvq_plan_options& o) { return std::max(1, o.max_new_tokens); }

Kernels chosen(const LoadedLayer& layer, const kvq_plan_options& o) {
  Kernels made{.key = layer.key, .first_layer = layer.plan.layer, .num_kv_heads = layer.heads.num_kv};
  made.write = choose_write(made.key), made.dequantize = choose_dequantize(made.key);
  if (o.max_batch > 0) made.decode = choose_decode(made.key, new_tokens(o));
  if (o.max_prefill_batch > 0) {
    made.prefill = choose_prefill(made.dequantize);
    made.prefill_launch.shape = prefill_shape(layer, o);
    raise(check_prefill_shape(made.prefill, made.dequantize, made.prefill_launch.shape));
  }
  return made;
}

/// Asks the current device.
void prepare(const kvq_plan_options& o, Kernels& made, kvq_plan& plan) {
  raise(made.write.plan(made.write_launch));
  raise(made.dequantize.plan(made.dequantize_launch));
  plan.write_workspace_bytes = std::max(plan.write_workspace_bytes,
                                        kvq::write_workspace_bytes(made.write, made.num_kv_heads, o.max_write_tokens));
  if (o.max_batch > 0) {
    raise(made.decode.plan(made.decode_launch));
    const std::size_t work_tiles =
        decode_work_tiles(made.decode, o.max_batch, made.num_kv_heads, made.key.heads, new_tokens(o));
    plan.decode_workspace_bytes =
        std::max(plan.decode_workspace_bytes, kvq::decode_workspace_bytes(made.decode_launch, work_tiles));
  }
  if (o.flags & KVQ_PLAN_NO_OVERLAP) made.write_launch.overlapping = made.decode_launch.overlapping = false;
  if (o.max_prefill_batch > 0) {
    raise(made.prefill.plan(made.dequantize, made.prefill_launch));
    plan.prefill_workspace_bytes =
        std::max(plan.prefill_workspace_bytes, static_cast<std::size_t>(made.prefill_launch.workspace_bytes));
  }
}

template <typename Variant>
kvq_kernel_info told(const Variant& variant) {
  kvq_kernel_info info{};
  info.name = variant.name, info.tuned = variant.tuned;
  return info;
}

kvq_kernel_info kernel_info(const kvq_plan& plan, const Kernels& kernels, std::int32_t kernel) {
  switch (kernel) {
    case KVQ_KERNEL_WRITE: return told(kernels.write);
    case KVQ_KERNEL_DEQUANTIZE: return told(kernels.dequantize);
    case KVQ_KERNEL_DECODE:
      if (plan.max_batch > 0) return told(kernels.decode);
      throw Error{ErrorKind::usage, "plan: it has no decode kernels: max_batch is 0"};
    case KVQ_KERNEL_PREFILL:
      if (plan.prefills) return told(kernels.prefill);
      throw Error{ErrorKind::usage, "plan: it has no prefill kernels: max_prefill_batch is 0"};
    default: throw Error{ErrorKind::usage, fmt::format("plan: kernel: expected a kvq_kernel, found {}", kernel)};
  }
}

}  // namespace

namespace kvq::abi {

Status check_plan_options(const kvq_plan_options& o) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (o.flags & ~std::uint32_t{KVQ_PLAN_NO_OVERLAP})
    return Status::fail(kBad, "plan: flags: unknown bits in %#x", o.flags);
  if (o.max_batch < 0) return Status::fail(kBad, "plan: max_batch: expected 0 or more, found %d", o.max_batch);
  if (o.max_new_tokens < 0 || o.max_new_tokens > kMostNewTokens)
    return Status::fail(kBad, "plan: max_new_tokens: expected 0 to %d, found %d", kMostNewTokens, o.max_new_tokens);
  if (o.max_write_tokens < 0)
    return Status::fail(kBad, "plan: max_write_tokens: expected 0 or more, found %d", o.max_write_tokens);
  if (o.max_prefill_batch < 0)
    return Status::fail(kBad, "plan: max_prefill_batch: expected 0 or more, found %d", o.max_prefill_batch);
  if (o.max_prefill_batch == 0 &&
      (o.max_prefill_queries != 0 || o.max_prefill_keys != 0 || o.prefill_workspace_bytes != 0))
    return Status::fail(kBad, "plan: sizes of prefill without max_prefill_batch");
  if (o.max_prefill_batch > 0 && (o.max_prefill_queries < 1 || o.max_prefill_keys < o.max_prefill_queries))
    return Status::fail(kBad,
                        "plan: max_prefill_queries %d, max_prefill_keys %d: expected 1 or more, and keys for all "
                        "queries",
                        o.max_prefill_queries, o.max_prefill_keys);
  return {};
}

PrefillShape prefill_shape(const LoadedLayer& layer, const kvq_plan_options& o) {
  return {
      .batch = o.max_prefill_batch,
      .num_q_heads = layer.heads.num_q,
      .num_kv_heads = layer.heads.num_kv,
      .max_queries = o.max_prefill_queries,
      .max_keys = o.max_prefill_keys,
      .workspace_bytes = static_cast<std::int64_t>(o.prefill_workspace_bytes),
  };
}

Status find_layer(const char* call, const kvq_plan& plan, const kvq_cache* cache, int layer, CacheLayer& found) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (!cache) return Status::fail(kBad, "%s: cache must not be null", call);
  const DeviceModel& model = *cache->model;
  const auto index_among = [&](int first, std::size_t count, const char* what, std::size_t& index) {
    const std::int64_t i = std::int64_t{layer} - first, behind = static_cast<std::int64_t>(count);
    if (i < 0 || i >= behind)
      return Status::fail(kBad, "%s: layer: expected %d to %lld (of the %s), found %d", call, first,
                          static_cast<long long>(first + behind - 1), what, layer);
    index = static_cast<std::size_t>(i);
    return Status{};
  };
  std::size_t in_cache = 0, in_plan = 0;
  for (const Status& status : {index_among(model.first_layer, model.layers.size(), "cache", in_cache),
                               index_among(plan.first_layer, plan.of_layer.size(), "plan", in_plan)})
    if (!status.ok()) return status;
  found = {&model.layers[in_cache], &cache->pools[in_cache], &plan.kernels[plan.of_layer[in_plan]]};
  if (!(found.layer->key == found.kernels->key))
    return Status::fail(kBad, "%s: layer %d has another format than in the plan", call, layer);
  if (found.layer->num_kv_heads != found.kernels->num_kv_heads)
    return Status::fail(kBad, "%s: layer %d has %d KV heads, in the plan %d", call, layer, found.layer->num_kv_heads,
                        found.kernels->num_kv_heads);
  if (const Status status = check_device(call, model.device, "cache"); !status.ok()) return status;
  if (model.device != plan.device)
    return Status::fail(kBad, "%s: the plan was made on device %d, the cache is on %d", call, plan.device,
                        model.device);
  return {};
}

}  // namespace kvq::abi

kvq_status kvq_plan_create(const kvq_model* model, const kvq_plan_options* options, kvq_plan** plan, kvq_error* error) {
  return guarded(error, [&] {
    const LoadedModel& m = required(model, "model").model;
    required(plan, "plan");
    const kvq_plan_options o = options_of(options);
    auto made = std::make_unique<kvq_plan>();
    made->first_layer = m.claim.first_layer, made->max_batch = o.max_batch, made->prefills = o.max_prefill_batch > 0;
    made->max_new_tokens = new_tokens(o);
    for (const LoadedLayer& layer : m.layers) {
      const auto same = [&](const Kernels& k) { return k.key == layer.key && k.num_kv_heads == layer.heads.num_kv; };
      const auto found = std::find_if(made->kernels.begin(), made->kernels.end(), same);
      made->of_layer.push_back(static_cast<std::size_t>(found - made->kernels.begin()));
      if (found == made->kernels.end()) for_layer(layer.plan.layer, [&] { made->kernels.push_back(chosen(layer, o)); });
    }
    raise(cuda_status(cudaGetDevice(&made->device), "plan"));
    for (Kernels& kernels : made->kernels) for_layer(kernels.first_layer, [&] { prepare(o, kernels, *made); });
    *plan = made.release();
  });
}

void kvq_plan_destroy(kvq_plan* plan) { delete plan; }

kvq_status kvq_plan_kernel(const kvq_plan* plan, std::int32_t layer, std::int32_t kernel, kvq_kernel_info* info,
                           kvq_error* error) {
  return guarded(error, [&] {
    const kvq_plan& p = required(plan, "plan");
    const std::int64_t i = std::int64_t{layer} - p.first_layer;
    if (i < 0 || i >= static_cast<std::int64_t>(p.of_layer.size()))
      throw Error{ErrorKind::usage, fmt::format("plan: layer: expected {} to {}, found {}", p.first_layer,
                                                p.first_layer + static_cast<int>(p.of_layer.size()) - 1, layer)};
    raise(write_struct(kernel_info(p, p.kernels[p.of_layer[static_cast<std::size_t>(i)]], kernel), info, "info"));
  });
}

kvq_status kvq_plan_workspace_bytes(const kvq_plan* plan, std::int32_t kernel, size_t* bytes, kvq_error* error) {
  return guarded(error, [&] {
    const kvq_plan& p = required(plan, "plan");
    std::size_t& told = required(bytes, "bytes");
    if (kernel < KVQ_KERNEL_DECODE || kernel > KVQ_KERNEL_PREFILL)
      throw Error{ErrorKind::usage, fmt::format("plan: kernel: expected a kvq_kernel, found {}", kernel)};
    told = kernel == KVQ_KERNEL_DECODE    ? p.decode_workspace_bytes
           : kernel == KVQ_KERNEL_PREFILL ? p.prefill_workspace_bytes
           : kernel == KVQ_KERNEL_WRITE   ? p.write_workspace_bytes
                                          : 0;
  });
}
