#include <kvq/compute/blas.h>
#include <kvq/compute/parallel.h>
#include <kvq/compute/tensor_moments.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <utility>

namespace kvq {

namespace {

/// Tokens of one task. The number is fixed, so that sums keep one order.
constexpr std::int64_t kRangeTokens = 2048;

struct RowRange {
  std::int64_t first, count;
};

std::vector<RowRange> ranges_of(std::int64_t tokens, const MomentRequest& request) {
  const std::int64_t skipped_end = request.skipped_first + request.skipped_count;
  KVQ_ASSERT(request.skipped_first >= 0 && request.skipped_count >= 0 && skipped_end <= tokens);
  std::vector<RowRange> ranges;
  for (const auto& [begin, end] : {std::pair{std::int64_t{0}, request.skipped_first}, std::pair{skipped_end, tokens}})
    for (std::int64_t first = begin; first < end; first += kRangeTokens)
      ranges.push_back({first, std::min(kRangeTokens, end - first)});
  return ranges;
}

/// Calls f(task, head, range, rows of the range) for all ranges of all heads, in parallel.
template <typename F>
void for_each_range(const TensorView& tensor, const std::vector<RowRange>& ranges, F f) {
  const auto per_head = static_cast<std::int64_t>(ranges.size());
  parallel_for(tensor.heads * per_head, [&](std::int64_t task) {
    const RowRange range = ranges[static_cast<std::size_t>(task % per_head)];
    std::vector<float> rows(static_cast<std::size_t>(range.count * tensor.dim));
    const int head = static_cast<int>(task / per_head);
    tensor.load_head(head, range.first, range.count, rows.data());
    f(task, head, range, rows);
  });
}

}  // namespace

std::vector<MomentSum> second_moments(const TensorView& tensor, const MomentRequest& request) {
  const auto ranges = ranges_of(tensor.tokens, request);
  const auto per_head = static_cast<std::int64_t>(ranges.size());
  const std::span<const float> weights = request.weights;
  const auto tokens = static_cast<std::size_t>(tensor.tokens);
  const bool of_heads = weights.size() == tokens * static_cast<std::size_t>(tensor.heads);
  KVQ_ASSERT(tensor.heads % request.heads_per_group == 0 && (weights.empty() || of_heads || weights.size() == tokens));
  std::vector<MomentSum> partial(static_cast<std::size_t>(tensor.heads * per_head));
  for_each_range(tensor, ranges, [&](std::int64_t task, int head, RowRange range, const std::vector<float>& rows) {
    MomentSum sum(tensor.dim);
    const std::int64_t at = range.first + (of_heads ? head * tensor.tokens : 0);
    sum.add(rows, weights.empty()
                      ? weights
                      : weights.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(range.count)));
    partial[static_cast<std::size_t>(task)] = std::move(sum);
  });
  std::vector<MomentSum> result(static_cast<std::size_t>(tensor.heads / request.heads_per_group),
                                MomentSum{tensor.dim});
  for (std::int64_t task = 0; task < tensor.heads * per_head; ++task)
    result[static_cast<std::size_t>(task / per_head / request.heads_per_group)].add(
        partial[static_cast<std::size_t>(task)]);
  for (MomentSum& sum : result) sum.symmetrize();
  return result;
}

std::vector<float> quadratic_forms(const TensorView& tensor, std::span<const double> matrices,
                                   const MomentRequest& request) {
  const auto d = static_cast<std::size_t>(tensor.dim);
  KVQ_ASSERT(matrices.size() == static_cast<std::size_t>(tensor.heads) * d * d);
  const std::vector<float> narrow(matrices.begin(), matrices.end());
  std::vector<float> forms(static_cast<std::size_t>(tensor.heads * tensor.tokens));
  for_each_range(tensor, ranges_of(tensor.tokens, request),
                 [&](std::int64_t, int head, RowRange range, const std::vector<float>& rows) {
                   std::vector<float> product(rows.size());
                   blas::gemm_nn(range.count, tensor.dim, tensor.dim, rows.data(), tensor.dim,
                                 narrow.data() + static_cast<std::size_t>(head) * d * d, tensor.dim, false,
                                 product.data(), tensor.dim);
                   float* out = forms.data() + head * tensor.tokens + range.first;
                   for (std::size_t t = 0; t < static_cast<std::size_t>(range.count); ++t) {
                     double sum = 0.0;
                     for (std::size_t j = 0; j < d; ++j) sum += double{product[t * d + j]} * rows[t * d + j];
                     out[t] = static_cast<float>(std::max(sum, 0.0));
                   }
                 });
  return forms;
}

}  // namespace kvq
