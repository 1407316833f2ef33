#include <kvq/runtime/api/handles.h>

using namespace kvq;
using namespace kvq::abi;

namespace {

Status prefill(const kvq_plan* plan, const kvq_cache* cache, int layer, const kvq_prefill_args* args,
               kvq_stream stream) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (!plan) return Status::fail(kBad, "prefill: plan must not be null");
  kvq_prefill_args a;
  if (const Status status = read_struct(args, a, "args"); !status.ok()) return status;
  CacheLayer found;
  if (const Status status = find_layer("prefill", *plan, cache, layer, found); !status.ok()) return status;
  if (!plan->prefills)
    return Status::fail(kBad, "prefill: the plan has no prefill kernels: its max_prefill_batch is 0");
  const kvq_device_layer& l = *found.layer;
  const PrefillVariant& variant = found.kernels->prefill;
  const PrefillLaunch& launch = found.kernels->prefill_launch;
  const std::size_t bytes = plan->prefill_workspace_bytes;
  PrefillParams p;
  p.cache = paged_cache_view(*cache, found, layer);
  if (const Status status = read_sequences("prefill", a.sequences, launch.shape.batch, p.cache); !status.ok())
    return status;
  AttentionOptions options;
  if (const Status status =
          attention_options("prefill", l, a.softmax_scale, a.logit_softcap, a.sliding_window, options);
      !status.ok())
    return status;
  if (p.cache.batch > 0 && bytes > 0 && (!a.workspace || !aligned(a.workspace, 256) || a.workspace_bytes < bytes))
    return Status::fail(kBad, "prefill: expected a workspace of %zu bytes, aligned to 256, found %zu bytes", bytes,
                        a.workspace_bytes);
  if (l.folded.k && l.pointers.center_k && (a.lse_natural || a.sink_logits || options.logit_softcap > 0.0f))
    return Status::fail(
        StatusCode::unsupported,
        "prefill: layer %d: lse_natural, sink_logits and logit_softcap with keys whose center is folded: new keys come "
        "without it; supported without a center, or not folded",
        layer);

  if (l.center_in_o_proj && a.sink_logits)
    return Status::fail(StatusCode::unsupported,
                        "prefill: layer %d: sink_logits with values whose center is folded into o_proj, which takes "
                        "weights to sum to 1; supported without a center, or not folded",
                        layer);

  const std::int64_t q_heads = l.num_q_heads, kv_heads = l.num_kv_heads, k_dim = l.pages.k.head_dim,
                     v_dim = l.pages.v.head_dim;
  p.num_q_heads = l.num_q_heads;
  p.softmax_scale = options.softmax_scale, p.logit_softcap = options.logit_softcap;
  p.sliding_window = options.sliding_window;
  p.sink_logits = a.sink_logits;
  p.num_tokens = a.num_tokens, p.q_indptr = a.q_indptr;
  p.max_queries = launch.shape.max_queries, p.max_keys = launch.shape.max_keys;
  p.q = a.q, p.k = a.k, p.v = a.v, p.out = a.out, p.lse = a.lse_natural;
  p.q_stride = a.q_stride ? a.q_stride : q_heads * k_dim, p.out_stride = a.out_stride ? a.out_stride : q_heads * v_dim;
  p.k_stride = a.k_stride ? a.k_stride : kv_heads * k_dim, p.v_stride = a.v_stride ? a.v_stride : kv_heads * v_dim;
  p.prefix_lens = a.prefix_lens;
  p.workspace = static_cast<std::byte*>(a.workspace);
  if (const Status status = check_prefill(variant, found.kernels->dequantize, launch, p); !status.ok()) return status;
  return variant.run(found.kernels->dequantize, launch, p, stream);
}

}  // namespace

kvq_status kvq_prefill_run(const kvq_plan* plan, const kvq_cache* cache, std::int32_t layer,
                           const kvq_prefill_args* args, kvq_stream stream, kvq_error* error) {
  return done(error, prefill(plan, cache, layer, args, stream));
}
