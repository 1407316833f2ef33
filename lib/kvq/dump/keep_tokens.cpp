#include <kvq/core/error.h>
#include <kvq/dump/content_hash.h>
#include <kvq/dump/keep_tokens.h>

#include <algorithm>

namespace kvq {

namespace {

template <typename T>
void keep(std::vector<T>& values, std::int64_t first, std::int64_t count) {
  if (values.empty()) return;
  values.erase(values.begin() + static_cast<std::ptrdiff_t>(first + count), values.end());
  values.erase(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(first));
}

void keep_rows(ActivationTensor& tensor, std::int64_t first, std::int64_t count) {
  const auto token = static_cast<std::int64_t>(size_of(tensor.dtype)) * tensor.heads * tensor.dim;
  keep(tensor.raw, first * token, count * token);
  tensor.raw.shrink_to_fit();
  tensor.tokens = count;
}

/// The part of joined ranges that tokens [first, first + count) of their union take.
std::vector<DumpRange> cut_ranges(const std::vector<DumpRange>& ranges, std::int64_t first, std::int64_t count) {
  std::vector<DumpRange> kept;
  std::int64_t begin = 0;  // of the range in the union
  for (const DumpRange& range : ranges) {
    const std::int64_t from = std::clamp<std::int64_t>(first - begin, 0, range.count);
    const std::int64_t to = std::clamp<std::int64_t>(first + count - begin, 0, range.count);
    if (to > from) kept.push_back({range.dump, range.first + from, to - from});
    begin += range.count;
  }
  return kept;
}

}  // namespace

void keep_tokens(LayerActivations& layer, std::int64_t first, std::int64_t count) {
  const std::int64_t tokens = layer.k.tokens;
  KVQ_ASSERT(first >= 0 && count >= 1 && first <= tokens - count);
  if (first == 0 && count == tokens) return;
  keep_rows(layer.q, first, count);
  keep_rows(layer.k, first, count);
  if (layer.v) keep_rows(*layer.v, first, count);
  keep(layer.positions, first, count);
  keep(layer.generated, first, count);
  std::vector<std::int64_t> borders{0};
  for (const std::int64_t border : layer.cu_seqlens) {
    const std::int64_t place = std::clamp<std::int64_t>(border - first, 0, count);
    if (place > borders.back()) borders.push_back(place);
  }
  layer.cu_seqlens = std::move(borders);
  layer.ranges = cut_ranges(layer.ranges, first, count);
  layer.content_hash = range_hash_of(layer.content_hash, first, count);
}

}  // namespace kvq
