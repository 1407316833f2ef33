#include <kvq/compute/cuda/attention.h>
#include <kvq/compute/cuda/moments.h>
#include <kvq/compute/device_bytes.h>

#include <algorithm>
#include <vector>

namespace kvq::cuda {

namespace {

constexpr const char* kWhat = "attention moments";

std::size_t size(std::int64_t x) { return static_cast<std::size_t>(x); }

Parts split(Context& context, Buffer& buffer, const Rows& rows, int dim) {
  Parts parts{.count = parts_of(rows.type), .heads = rows.heads, .padded_dim = dim, .tokens = rows.tokens};
  parts.data = buffer.room<std::uint16_t>(size(parts.count * parts.part_size()), kWhat);
  split_rows(rows, parts, context.stream());
  return parts;
}

double sum_of(const std::vector<float>& weights, std::size_t first, std::size_t count) {
  double sum = 0.0;
  for (std::size_t i = first; i < first + count; ++i) sum += double{weights[i]};
  return sum;
}

AttentionShape shape_of(const SequenceAttention& sequence, bool scored) {
  const LayerGeometry& geometry = sequence.geometry;
  AttentionShape shape{.tokens = sequence.count,
                       .group = geometry.queries_per_kv_head(),
                       .k_dim = geometry.head_dim,
                       .v_dim = geometry.v_head_dim,
                       .scored = scored};
  for (const TensorView* tensor : {&sequence.q, &sequence.k, &sequence.v}) {
    if (tensor->dtype == DType::f32) shape.number_bytes = 4;
    if (tensor->dtype != DType::bf16) shape.parts_bytes = 6;
  }
  return shape;
}

/// A batch of KV heads.
void add_heads(Context& context, const SequenceAttention& sequence, int first, int heads, bool scored,
               std::span<AttentionMoments> into) {
  const LayerGeometry& geometry = sequence.geometry;
  const int group = geometry.queries_per_kv_head(), dim = padded_dim(geometry.head_dim, geometry.v_head_dim);
  const std::int64_t n = sequence.count, query_rows = std::int64_t{heads} * group * n;
  CUstream_st* stream = context.stream();
  const Rows q = upload_rows(context, context.rows, sequence.q, first * group, heads * group, sequence.first, n),
             k = upload_rows(context, context.keys, sequence.k, first, heads, sequence.first, n),
             v = upload_rows(context, context.values, sequence.v, first, heads, sequence.first, n);
  Attention attention{.q = split(context, context.parts_q, q, dim),
                      .k = split(context, context.parts_k, k, dim),
                      .v = split(context, context.parts_v, v, dim),
                      .group = group,
                      .scale = static_cast<float>(geometry.softmax_scale),
                      .cap = static_cast<float>(geometry.logit_softcap),
                      .window = geometry.sliding_window};
  const std::uint8_t* counts = sequence.counts == nullptr ? nullptr : sequence.counts + sequence.first;
  if (counts) attention.counts = context.upload(context.counts, counts, size(n), kWhat);
  std::vector<float> sinks;
  for (int h = first; h < first + heads; ++h)
    for (const double sink : geometry.sinks_of(h)) sinks.push_back(static_cast<float>(sink));
  if (!sinks.empty()) attention.sinks = context.upload(context.sinks, sinks.data(), sinks.size(), kWhat);
  attention.outputs = context.outputs.room<float>(size(query_rows * dim), kWhat);
  attention.largest = context.softmax.room<float>(size(2 * query_rows), kWhat);
  attention.inverse_sum = attention.largest + query_rows;
  double* columns = context.columns.room<double>(size(heads * n), kWhat);
  attend(attention, stream);
  column_energies(attention, columns, stream);
  float *norms = nullptr, *scores = nullptr;
  if (scored) {
    norms = context.norms.room<float>(size(heads * n), kWhat);
    scores = context.scores.room<float>(size(query_rows), kWhat);
    squared_norms(v, norms, stream);
    score_queries(attention, norms, scores, stream);
  }
  check(cudaGetLastError(), kWhat);
  const std::int64_t counted = counts ? std::count_if(counts, counts + n, [](std::uint8_t c) { return c != 0; }) : n;
  const std::vector<double> energies = context.download(columns, size(heads * n), kWhat);
  const std::vector<float> weights = scored ? context.download(scores, size(query_rows), kWhat) : std::vector<float>{};
  for (int h = 0; h < heads; ++h) {
    AttentionMoments& moments = into[static_cast<std::size_t>(first + h)];
    const auto at = energies.begin() + h * n;
    moments.column_energy.assign(at, at + n);
    const Rows outputs{.data = attention.outputs + h * group * n * dim,
                       .head_stride = n * dim,
                       .token_stride = dim,
                       .tokens = n,
                       .heads = group,
                       .dim = geometry.v_head_dim};
    add_moment(context, outputs, {.counts = attention.counts}, moments.outputs);
    moments.outputs.weight += static_cast<double>(counted * group);
    if (!scored) continue;
    Rows queries = q.head(h * group);
    queries.heads = group;
    add_moment(context, queries, {.of_tokens = scores + h * group * n, .head_stride = n}, moments.scored_query);
    moments.scored_query.weight += sum_of(weights, size(h * group * n), size(group * n));
  }
}

}  // namespace

bool can_attend(const LayerGeometry& geometry) {
  return geometry.head_dim <= kMostDim && geometry.v_head_dim <= kMostDim;
}

void add_attention_moments(Context& context, const SequenceAttention& sequence, int first_kv_head, int kv_heads,
                           bool with_scored_query, std::span<AttentionMoments> into,
                           const std::function<void()>& head_done) {
  const LayerGeometry& geometry = sequence.geometry;
  KVQ_ASSERT(can_attend(geometry));
  const AttentionShape shape = shape_of(sequence, with_scored_query);
  const Claim claim(context.lane, attention_need(shape, kv_heads));
  const int at_once =
      static_cast<int>(units_at_once(claim.bytes(), attention_shared_bytes(shape), attention_head_bytes(shape),
                                     attention_heads_wanted(shape, kv_heads)));
  for (int h = first_kv_head; h < first_kv_head + kv_heads; h += at_once) {
    const int heads = std::min(at_once, first_kv_head + kv_heads - h);
    add_heads(context, sequence, h, heads, with_scored_query, into);
    for (int i = 0; i < heads && head_done; ++i) head_done();
  }
}

}  // namespace kvq::cuda
