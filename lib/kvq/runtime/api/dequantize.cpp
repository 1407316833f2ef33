#include <kvq/runtime/api/handles.h>

#include <limits>

using namespace kvq;
using namespace kvq::abi;

namespace {

Status dequantize(const kvq_plan* plan, const kvq_cache* cache, int layer, const kvq_dequantize_args* args,
                  kvq_stream stream) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (!plan) return Status::fail(kBad, "dequantize: plan must not be null");
  kvq_dequantize_args a;
  if (const Status status = read_struct(args, a, "args"); !status.ok()) return status;
  CacheLayer found;
  if (const Status status = find_layer("dequantize", *plan, cache, layer, found); !status.ok()) return status;
  if (a.flags & ~std::uint32_t{KVQ_DEQUANTIZE_ROTATED})
    return Status::fail(kBad, "dequantize: flags: unknown bits in %#x", a.flags);
  const kvq_device_layer& l = *found.layer;
  DequantizeParams p;
  p.cache = paged_cache_view(*cache, found, layer);
  constexpr int kAnyBatch = std::numeric_limits<int>::max();
  if (const Status status = read_sequences("dequantize", a.sequences, kAnyBatch, p.cache); !status.ok()) return status;
  if (a.flags & KVQ_DEQUANTIZE_ROTATED) {
    p.cache.rotation_k = p.cache.rotation_v = {};
    p.cache.center_k = p.cache.center_v = nullptr;
  }
  p.num_rows = a.num_rows;
  p.first = a.first, p.last = a.last, p.out_indptr = a.out_indptr;
  p.k = a.k, p.v = a.v;
  const std::int64_t heads = l.num_kv_heads;
  p.k_stride = a.k_stride ? a.k_stride : heads * l.pages.k.head_dim;
  p.v_stride = a.v_stride ? a.v_stride : heads * l.pages.v.head_dim;
  if (const Status status = check_dequantize(found.kernels->dequantize, p); !status.ok()) return status;
  if (p.cache.batch == 0) return {};
  return found.kernels->dequantize.run(found.kernels->dequantize_launch, p, stream);
}

}  // namespace

kvq_status kvq_dequantize_run(const kvq_plan* plan, const kvq_cache* cache, std::int32_t layer,
                              const kvq_dequantize_args* args, kvq_stream stream, kvq_error* error) {
  return done(error, dequantize(plan, cache, layer, args, stream));
}
