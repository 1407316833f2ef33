#include <kvq/core/error.h>
#include <kvq/core/random.h>
#include <kvq/stats/token_sample.h>

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvq {

namespace {

struct Candidate {
  std::int64_t key;
  std::int64_t token;
  bool operator<(const Candidate& other) const { return std::pair{key, token} < std::pair{other.key, other.token}; }
};

std::int64_t sampling_key(std::uint64_t seed, std::uint64_t sequence_hash, std::int64_t index, int layer) {
  const auto block = philox({static_cast<std::uint32_t>(sequence_hash), static_cast<std::uint32_t>(sequence_hash >> 32),
                             static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(layer)},
                            {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  return static_cast<std::int64_t>(((std::uint64_t{block[0]} << 32) | block[1]) >> 1);
}

std::size_t row_size(const SampledRows& rows) {
  return static_cast<std::size_t>(rows.heads) * static_cast<std::size_t>(rows.dim) * size_of(rows.dtype);
}

SampledRows widened(const SampledRows& rows) {
  if (rows.dtype == DType::f32) return rows;
  SampledRows wide{DType::f32, rows.heads, rows.dim, {}};
  const std::size_t count = rows.raw.size() / size_of(rows.dtype);
  wide.raw.resize(4 * count);
  widen(rows.dtype, rows.raw.data(), count, reinterpret_cast<float*>(wide.raw.data()));
  return wide;
}

/// Row `index` of a, or of b when index is behind a's rows. If the types of a and b differ, the result is float32.
SampledRows pick(const SampledRows& a_in, const SampledRows& b_in, const std::vector<std::size_t>& order,
                 std::size_t a_count) {
  KVQ_ASSERT(a_in.heads == b_in.heads && a_in.dim == b_in.dim);
  const bool same = a_in.dtype == b_in.dtype;
  const SampledRows a = same ? a_in : widened(a_in);
  const SampledRows b = same ? b_in : widened(b_in);
  SampledRows out{a.dtype, a.heads, a.dim, {}};
  const std::size_t bytes = row_size(out);
  out.raw.resize(order.size() * bytes);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const bool first = order[i] < a_count;
    const std::byte* source = first ? a.raw.data() + order[i] * bytes : b.raw.data() + (order[i] - a_count) * bytes;
    std::copy_n(source, bytes,
                out.raw.begin() + static_cast<std::ptrdiff_t>(i * bytes));  // 0 bytes for a layer without values
  }
  return out;
}

}  // namespace

SampledRows gather_rows(const ActivationTensor& tensor, const std::vector<std::int64_t>& tokens) {
  SampledRows rows{tensor.dtype, tensor.heads, tensor.dim, {}};
  const std::size_t bytes = row_size(rows);
  rows.raw.resize(tokens.size() * bytes);
  for (std::size_t i = 0; i < tokens.size(); ++i)
    std::memcpy(rows.raw.data() + i * bytes, tensor.raw.data() + static_cast<std::size_t>(tokens[i]) * bytes, bytes);
  return rows;
}

std::vector<float> SampledRows::head(int h) const {
  const auto d = static_cast<std::size_t>(dim);
  const std::size_t width = size_of(dtype);
  const std::size_t rows = heads == 0 ? 0 : raw.size() / (static_cast<std::size_t>(heads) * d * width);
  std::vector<float> out(rows * d);
  for (std::size_t t = 0; t < rows; ++t)
    widen(dtype, raw.data() + (t * static_cast<std::size_t>(heads) + static_cast<std::size_t>(h)) * d * width, d,
          out.data() + t * d);
  return out;
}

std::vector<float> TokenSample::weights(int kv_head, int num_kv_heads) const {
  std::vector<float> out(key.size(), 1.0f);
  if (!value_weight.empty())
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = value_weight[i * static_cast<std::size_t>(num_kv_heads) + static_cast<std::size_t>(kv_head)];
  return out;
}

TokenSample sample_tokens(const LayerActivations& layer, std::uint64_t seed, std::int64_t count,
                          std::int64_t skip_first, std::int64_t skip_end) {
  std::vector<Candidate> candidates;
  candidates.reserve(static_cast<std::size_t>(layer.cu_seqlens.back()));
  const std::size_t row =
      static_cast<std::size_t>(layer.k.heads) * static_cast<std::size_t>(layer.k.dim) * size_of(layer.k.dtype);
  for (std::size_t s = 0; s + 1 < layer.cu_seqlens.size(); ++s) {
    const std::int64_t begin = layer.cu_seqlens[s], end = layer.cu_seqlens[s + 1];
    const std::uint64_t hash = XXH3_64bits(layer.k.raw.data() + static_cast<std::size_t>(begin) * row,
                                           static_cast<std::size_t>(end - begin) * row);
    for (std::int64_t t = begin; t < end; ++t)
      if (t < skip_first || t >= skip_end) candidates.push_back({sampling_key(seed, hash, t - begin, layer.layer), t});
  }
  const auto n =
      static_cast<std::ptrdiff_t>(std::min<std::int64_t>(count, static_cast<std::int64_t>(candidates.size())));
  std::partial_sort(candidates.begin(), candidates.begin() + n, candidates.end());
  TokenSample sample;
  for (std::ptrdiff_t i = 0; i < n; ++i) {
    sample.key.push_back(candidates[static_cast<std::size_t>(i)].key);
    sample.token.push_back(candidates[static_cast<std::size_t>(i)].token);
  }
  sample.q = gather_rows(layer.q, sample.token);
  sample.k = gather_rows(layer.k, sample.token);
  if (layer.v) sample.v = gather_rows(*layer.v, sample.token);
  return sample;
}

TokenSample merge_samples(const TokenSample& a, const TokenSample& b, std::int64_t token_offset, std::int64_t count) {
  std::vector<std::pair<Candidate, std::size_t>> all;
  all.reserve(a.key.size() + b.key.size());
  for (std::size_t i = 0; i < a.key.size(); ++i) all.push_back({{a.key[i], a.token[i]}, i});
  for (std::size_t i = 0; i < b.key.size(); ++i)
    all.push_back({{b.key[i], b.token[i] + token_offset}, a.key.size() + i});
  std::sort(all.begin(), all.end(), [](const auto& x, const auto& y) { return x.first < y.first; });
  all.resize(std::min(all.size(), static_cast<std::size_t>(count)));

  TokenSample merged;
  std::vector<std::size_t> order;
  for (const auto& [candidate, index] : all) {
    merged.key.push_back(candidate.key);
    merged.token.push_back(candidate.token);
    order.push_back(index);
  }
  merged.q = pick(a.q, b.q, order, a.key.size());
  merged.k = pick(a.k, b.k, order, a.key.size());
  merged.v = pick(a.v, b.v, order, a.key.size());
  if (!a.value_weight.empty() && !b.value_weight.empty()) {
    const std::size_t heads = a.value_weight.size() / a.key.size();
    for (const std::size_t index : order)
      for (std::size_t h = 0; h < heads; ++h)
        merged.value_weight.push_back(index < a.key.size() ? a.value_weight[index * heads + h]
                                                           : b.value_weight[(index - a.key.size()) * heads + h]);
  }
  return merged;
}

}  // namespace kvq
