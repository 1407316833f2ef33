#include "support/layers.h"

#include "support/random_data.h"

#include <fmt/core.h>

#include <cstring>
#include <numeric>
#include <span>

namespace kvq::test {

namespace {

ActivationTensor make_tensor(DType dtype, std::int64_t tokens, int heads, int dim, const std::vector<float>& numbers) {
  ActivationTensor tensor{.dtype = dtype, .tokens = tokens, .heads = heads, .dim = dim, .raw = {}};
  tensor.raw.resize(numbers.size() * size_of(dtype));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (dtype == DType::f32) {
      std::memcpy(tensor.raw.data() + 4 * i, &numbers[i], 4);
    } else {
      const std::uint16_t bits = dtype == DType::f16 ? float_to_f16(numbers[i]) : float_to_bf16(numbers[i]);
      std::memcpy(tensor.raw.data() + 2 * i, &bits, 2);
    }
  }
  return tensor;
}

ActivationTensor random_tensor(const LayerSpec& spec, std::int64_t tokens, int heads, int dim, std::uint64_t purpose) {
  const std::uint64_t seed = spec.seed * 1000 + static_cast<std::uint64_t>(spec.layer) * 10 + purpose;
  const auto rows = static_cast<std::size_t>(tokens * heads);
  return make_tensor(
      spec.dtype, tokens, heads, dim,
      spec.outliers ? rows_with_outliers(rows, dim, seed) : gaussian(rows * static_cast<std::size_t>(dim), seed));
}

ActivationTensor keep_tokens(const ActivationTensor& tensor, std::int64_t first, std::int64_t count) {
  ActivationTensor kept{.dtype = tensor.dtype, .tokens = count, .heads = tensor.heads, .dim = tensor.dim, .raw = {}};
  const auto row = static_cast<std::int64_t>(size_of(tensor.dtype)) * tensor.heads * tensor.dim;
  kept.raw.assign(tensor.raw.begin() + first * row, tensor.raw.begin() + (first + count) * row);
  return kept;
}

/// A distinct hash text for each number. Tests of the dump reader test the real hash.
std::string made_up_hash(std::uint64_t number) { return fmt::format("xxh3-128:{:032x}", number); }

}  // namespace

LayerActivations make_layer(const LayerSpec& spec) {
  LayerActivations layer{
      .layer = spec.layer,
      .geometry =
          {
              .num_q_heads = spec.num_q_heads,
              .num_kv_heads = spec.num_kv_heads,
              .head_dim = spec.head_dim,
              .v_head_dim = spec.v_head_dim,
              .softmax_scale = spec.softmax_scale,
              .sliding_window = spec.sliding_window,
              .kind = spec.has_values ? AttentionKind::gqa : AttentionKind::mla_rope,
          },
      .cu_seqlens = {0},
      .positions = {},
      .generated = {},
      .q = {},
      .k = {},
      .v = {},
      .o_proj = {},
      .o_proj_rows = 0,
      .o_proj_metric = {},
      .output_curvature = {},
      .content_hash = made_up_hash(spec.seed * 100 + static_cast<std::uint64_t>(spec.layer)),
      .ranges = {},
  };
  for (const std::int64_t length : spec.lengths) {
    layer.cu_seqlens.push_back(layer.cu_seqlens.back() + length);
    for (std::int64_t position = 0; position < length; ++position) layer.positions.push_back(position);
  }
  const std::int64_t tokens = layer.cu_seqlens.back();
  layer.q = random_tensor(spec, tokens, spec.num_q_heads, spec.head_dim, 1);
  layer.k = random_tensor(spec, tokens, spec.num_kv_heads, spec.head_dim, 2);
  if (spec.has_values) layer.v = random_tensor(spec, tokens, spec.num_kv_heads, spec.v_head_dim, 3);
  layer.ranges = {{layer.content_hash, 0, tokens}};
  return layer;
}

LayerActivations keep_sequences(const LayerActivations& layer, std::size_t first, std::size_t count) {
  LayerActivations kept = layer;
  const std::int64_t begin = layer.cu_seqlens.at(first), end = layer.cu_seqlens.at(first + count);
  kept.cu_seqlens.clear();
  for (std::size_t s = first; s <= first + count; ++s) kept.cu_seqlens.push_back(layer.cu_seqlens[s] - begin);
  kept.positions.assign(layer.positions.begin() + begin, layer.positions.begin() + end);
  if (!layer.generated.empty()) kept.generated.assign(layer.generated.begin() + begin, layer.generated.begin() + end);
  kept.q = keep_tokens(layer.q, begin, end - begin);
  kept.k = keep_tokens(layer.k, begin, end - begin);
  if (layer.v) kept.v = keep_tokens(*layer.v, begin, end - begin);
  kept.content_hash = made_up_hash(1000000 + first * 1000 + count);
  kept.ranges = {{layer.content_hash, begin, end - begin}};
  return kept;
}

AttentionCase attention_case(const LayerActivations& layer, std::size_t sequence, int kv_head) {
  const std::int64_t first = layer.cu_seqlens.at(sequence), tokens = layer.cu_seqlens.at(sequence + 1) - first;
  const LayerGeometry& geometry = layer.geometry;
  AttentionCase input{
      .tokens = tokens,
      .queries = geometry.queries_per_kv_head(),
      .dim = geometry.head_dim,
      .v_dim = geometry.v_head_dim,
      .scale = geometry.softmax_scale,
      .window = geometry.sliding_window,
      .cap = geometry.logit_softcap,
      .sinks = {geometry.sinks_of(kv_head).begin(), geometry.sinks_of(kv_head).end()},
  };
  const auto key_size = static_cast<std::size_t>(tokens * geometry.head_dim);
  input.q.resize(static_cast<std::size_t>(input.queries) * key_size);
  for (int query = 0; query < input.queries; ++query)
    layer.q.load_head(kv_head * input.queries + query, first, tokens,
                      input.q.data() + static_cast<std::size_t>(query) * key_size);
  input.k.resize(key_size);
  layer.k.load_head(kv_head, first, tokens, input.k.data());
  input.v.resize(static_cast<std::size_t>(tokens * geometry.v_head_dim));
  if (layer.v) layer.v->load_head(kv_head, first, tokens, input.v.data());
  return input;
}

std::set<Moment> all_moments(bool has_values) {
  if (!has_values) return {Moment::query, Moment::key};
  return {std::begin(kAllMoments), std::end(kAllMoments)};
}

}  // namespace kvq::test
