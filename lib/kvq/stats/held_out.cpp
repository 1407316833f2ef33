#include <kvq/stats/held_out.h>

#include <algorithm>
#include <numeric>

namespace kvq {

namespace {

constexpr std::int64_t kMostQueries = 512;
constexpr std::int64_t kLeastTokens = 8;

}  // namespace

std::int64_t HeldOut::count() const {
  const std::size_t row = static_cast<std::size_t>(k.heads) * static_cast<std::size_t>(k.dim) * size_of(k.dtype);
  return row == 0 ? 0 : static_cast<std::int64_t>(k.raw.size() / row);
}

TokenRange choose_held_out(const LayerActivations& layer, std::int64_t wanted) {
  TokenRange longest;
  for (std::size_t s = 0; s + 1 < layer.cu_seqlens.size(); ++s) {
    const std::int64_t length = layer.cu_seqlens[s + 1] - layer.cu_seqlens[s];
    if (length > longest.count) longest = {layer.cu_seqlens[s], length};
  }
  longest.count = std::min({longest.count, wanted, layer.k.tokens / 3});
  return longest.count < kLeastTokens ? TokenRange{} : longest;
}

HeldOut hold_out(const LayerActivations& layer, const TokenRange& range) {
  HeldOut held;
  held.token = range.first;
  const std::int64_t queries = std::min(kMostQueries, range.count);
  std::vector<std::int64_t> all(static_cast<std::size_t>(range.count)), asked;
  std::iota(all.begin(), all.end(), range.first);
  for (std::int64_t i = 0; i < queries; ++i) {
    held.query.push_back((2 * i + 1) * range.count / (2 * queries));
    asked.push_back(range.first + held.query.back());
  }
  held.q = gather_rows(layer.q, asked);
  held.k = gather_rows(layer.k, all);
  if (layer.v) held.v = gather_rows(*layer.v, all);
  held.curvature = layer.output_curvature;
  return held;
}

}  // namespace kvq
