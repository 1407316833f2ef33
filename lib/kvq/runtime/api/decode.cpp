#include <kvq/runtime/api/handles.h>

using namespace kvq;
using namespace kvq::abi;

Status kvq::abi::decode_params(const kvq_plan& plan, const kvq_cache* cache, int layer, const kvq_decode_args& a,
                               CacheLayer& found, DecodeParams& p) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (const Status status = find_layer("decode", plan, cache, layer, found); !status.ok()) return status;
  if (plan.max_batch == 0) return Status::fail(kBad, "decode: the plan has no decode kernels: its max_batch is 0");
  const auto& [l, pools, kernels] = found;
  p.cache = paged_cache_view(*cache, found, layer);
  if (const Status status = read_sequences("decode", a.sequences, plan.max_batch, p.cache); !status.ok()) return status;
  AttentionOptions options;
  if (const Status status =
          attention_options("decode", *l, a.softmax_scale, a.logit_softcap, a.sliding_window, options);
      !status.ok())
    return status;
  if (p.cache.batch > 0 &&
      (!a.workspace || !aligned(a.workspace, 256) || a.workspace_bytes < plan.decode_workspace_bytes))
    return Status::fail(kBad, "decode: expected a workspace of %zu bytes, aligned to 256, found %zu bytes",
                        plan.decode_workspace_bytes, a.workspace_bytes);
  if (l->center_in_o_proj && a.sink_logits)
    return Status::fail(StatusCode::unsupported,
                        "decode: layer %d: sink_logits with values whose center is folded into o_proj, which takes "
                        "weights to sum to 1; supported without a center, or not folded",
                        layer);

  const std::int64_t heads = l->num_q_heads;
  p.num_q_heads = l->num_q_heads;
  p.softmax_scale = options.softmax_scale, p.logit_softcap = options.logit_softcap;
  p.sliding_window = options.sliding_window;
  if (a.q_indptr) p.q_indptr = a.q_indptr, p.num_tokens = a.num_tokens, p.max_new_tokens = plan.max_new_tokens;
  p.token_masks = a.token_masks;
  p.first = a.first, p.last = a.last;
  p.q = a.q, p.q_stride = a.q_stride ? a.q_stride : heads * l->pages.k.head_dim;
  p.out = a.out, p.out_stride = a.out_stride ? a.out_stride : heads * l->pages.v.head_dim;
  p.lse = a.lse_natural;
  p.cache.center_k = l->pointers.center_k;  // of folded keys, too: it enters lse and sink logits
  p.sink_logits = a.sink_logits;
  p.workspace = a.workspace;
  return check_decode(kernels->decode, p);
}

namespace {

Status run_decode(const kvq_plan* plan, const kvq_cache* cache, int layer, const kvq_decode_args* args,
                  kvq_stream stream) {
  if (!plan) return Status::fail(StatusCode::invalid_argument, "decode: plan must not be null");
  kvq_decode_args a;
  if (const Status status = read_struct(args, a, "args"); !status.ok()) return status;
  CacheLayer found;
  DecodeParams p;
  if (const Status status = decode_params(*plan, cache, layer, a, found, p); !status.ok()) return status;
  return found.kernels->decode.run(found.kernels->decode_launch, p, stream);
}

}  // namespace

kvq_status kvq_decode_run(const kvq_plan* plan, const kvq_cache* cache, std::int32_t layer, const kvq_decode_args* args,
                          kvq_stream stream, kvq_error* error) {
  return done(error, run_decode(plan, cache, layer, args, stream));
}
