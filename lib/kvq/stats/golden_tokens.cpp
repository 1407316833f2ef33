#include <kvq/core/dtype.h>
#include <kvq/stats/golden_tokens.h>

#include <algorithm>

namespace kvq {

namespace {

/// [count, H, D]
std::vector<std::uint16_t> bf16_rows(const ActivationTensor& tensor, const TokenRange& range) {
  const std::size_t row = static_cast<std::size_t>(tensor.heads) * static_cast<std::size_t>(tensor.dim),
                    count = static_cast<std::size_t>(range.count) * row;
  std::vector<float> wide(count);
  widen(tensor.dtype, tensor.raw.data() + static_cast<std::size_t>(range.first) * row * size_of(tensor.dtype), count,
        wide.data());
  std::vector<std::uint16_t> bits(count);
  std::transform(wide.begin(), wide.end(), bits.begin(), float_to_bf16);
  return bits;
}

}  // namespace

TokenRange choose_golden(const LayerActivations& layer, std::int64_t wanted, const TokenRange& held_out) {
  TokenRange longest;
  for (std::size_t s = 0; s + 1 < layer.cu_seqlens.size(); ++s) {
    std::int64_t first = layer.cu_seqlens[s];
    const std::int64_t end = layer.cu_seqlens[s + 1];
    if (held_out.count > 0 && held_out.first == first) first += held_out.count;  // held-out tokens begin their sequence
    if (end - first > longest.count) longest = {first, end - first};
  }
  const std::int64_t count = std::clamp(wanted, std::int64_t{0}, longest.count);
  return {longest.first + longest.count - count, count};
}

GoldenTokens take_golden(const LayerActivations& layer, const TokenRange& range) {
  GoldenTokens golden{.first = range.first, .count = range.count};
  golden.q = bf16_rows(layer.q, {range.first + range.count - 1, 1});
  golden.k = bf16_rows(layer.k, range);
  if (layer.v) golden.v = bf16_rows(*layer.v, range);
  return golden;
}

GoldenTokens last_golden(GoldenTokens tokens, const LayerGeometry& geometry, std::int64_t count) {
  const std::int64_t dropped = std::max(std::int64_t{0}, tokens.count - count);
  const auto drop = [dropped](std::vector<std::uint16_t>& rows, std::int64_t row) {
    if (!rows.empty()) rows.erase(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(dropped * row));
  };
  drop(tokens.k, std::int64_t{geometry.num_kv_heads} * geometry.head_dim);
  drop(tokens.v, std::int64_t{geometry.num_kv_heads} * geometry.v_head_dim);
  tokens.first += dropped;
  tokens.count -= dropped;
  return tokens;
}

}  // namespace kvq
