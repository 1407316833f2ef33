#include <kvq/runtime/api/handles.h>

using namespace kvq;
using namespace kvq::abi;

namespace {

Status append(const kvq_plan* plan, const kvq_cache* cache, int layer, const kvq_append_args* args, kvq_stream stream) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (!plan) return Status::fail(kBad, "append: plan must not be null");
  kvq_append_args a;
  if (const Status status = read_struct(args, a, "args"); !status.ok()) return status;
  kvq_sequences sequences;
  if (const Status status = read_struct(a.sequences, sequences, "sequences"); !status.ok()) return status;
  kvq_write_args w{};
  w.num_tokens = a.q_indptr ? a.num_tokens : sequences.batch;
  w.k = a.k, w.v = a.v, w.k_token_stride = a.k_stride, w.v_token_stride = a.v_stride;
  w.slot_mapping = a.slot_mapping, w.window_mapping = a.window_mapping;
  kvq_decode_args d{};
  d.sequences = a.sequences;
  d.q = a.q, d.out = a.out, d.q_stride = a.q_stride, d.out_stride = a.out_stride;
  d.lse_natural = a.lse_natural, d.sink_logits = a.sink_logits;
  d.softmax_scale = a.softmax_scale, d.sliding_window = a.sliding_window;
  d.workspace = a.workspace, d.workspace_bytes = a.workspace_bytes;
  d.q_indptr = a.q_indptr, d.num_tokens = a.num_tokens, d.token_masks = a.token_masks;
  d.logit_softcap = a.logit_softcap;
  CacheLayer found;
  DecodeParams decode_p;
  WriteParams write_p;
  if (const Status status = decode_params(*plan, cache, layer, d, found, decode_p); !status.ok()) return status;
  if (const Status status = write_params(*plan, cache, layer, w, found, write_p); !status.ok()) return status;
  const kvq_plan::Kernels& kernels = *found.kernels;
  write_p.holds_next = decode_p.inputs_final =
      kernels.write_launch.overlapping && w.num_tokens > 0 && prepares_beside_write(sequences.batch);
  if (const Status status = kernels.write.run(kernels.write_launch, write_p, stream); !status.ok()) return status;
  return kernels.decode.run(kernels.decode_launch, decode_p, stream);
}

}  // namespace

kvq_status kvq_append_run(const kvq_plan* plan, const kvq_cache* cache, std::int32_t layer, const kvq_append_args* args,
                          kvq_stream stream, kvq_error* error) {
  return done(error, append(plan, cache, layer, args, stream));
}
