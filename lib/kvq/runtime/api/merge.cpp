#include <kvq/runtime/api/handles.h>
#include <kvq/runtime/kernels/merge/params.h>

using namespace kvq;
using namespace kvq::abi;

namespace {

Status merge(const kvq_merge_args* args, kvq_stream stream) {
  kvq_merge_args a;
  if (const Status status = read_struct(args, a, "args"); !status.ok()) return status;
  if (a.activation != KVQ_BF16 && a.activation != KVQ_FP16)
    return Status::fail(StatusCode::invalid_argument, "merge: activation is %d, expected 0 or 1", a.activation);
  MergeParams p;
  p.num_states = a.num_states, p.num_tokens = a.num_tokens, p.num_heads = a.num_heads, p.head_dim = a.head_dim;
  p.bf16 = a.activation == KVQ_BF16;
  const std::int64_t row = std::int64_t{a.num_heads} * a.head_dim;
  p.states = a.states;
  p.token_stride = a.token_stride ? a.token_stride : row;
  if (a.state_stride)
    p.state_stride = a.state_stride;
  else if (__builtin_mul_overflow(p.token_stride, std::int64_t{a.num_tokens}, &p.state_stride))
    return Status::fail(StatusCode::invalid_argument, "merge: token_stride is %lld, which is too large",
                        static_cast<long long>(a.token_stride));
  p.state_lse = a.state_lse_natural;
  p.out = a.out, p.out_stride = a.out_stride ? a.out_stride : row;
  p.lse = a.lse_natural;
  if (const Status status = check_merge(p); !status.ok()) return status;
  return run_merge(p, stream);
}

}  // namespace

kvq_status kvq_merge_run(const kvq_merge_args* args, kvq_stream stream, kvq_error* error) {
  return done(error, merge(args, stream));
}
