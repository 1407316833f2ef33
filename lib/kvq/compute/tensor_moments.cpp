#include <kvq/compute/blas.h>
#include <kvq/compute/parallel.h>
#include <kvq/compute/tensor_moments.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <utility>

namespace kvq {

namespace {

/// Tokens of one task. The number is fixed, so that sums keep one order.
constexpr std::int64_t kPieceTokens = 2048;

struct Piece {
  std::int64_t first, count;
};

std::vector<Piece> pieces_of(std::int64_t tokens, const MomentRequest& request) {
  const std::int64_t skipped_end = request.skipped_first + request.skipped_count;
  KVQ_ASSERT(request.skipped_first >= 0 && request.skipped_count >= 0 && skipped_end <= tokens);
  std::vector<Piece> pieces;
  for (const auto& [begin, end] : {std::pair{std::int64_t{0}, request.skipped_first}, std::pair{skipped_end, tokens}})
    for (std::int64_t first = begin; first < end; first += kPieceTokens)
      pieces.push_back({first, std::min(kPieceTokens, end - first)});
  return pieces;
}

/// Calls f(task, head, piece, rows of the piece) for all pieces of all heads, in parallel.
template <typename F>
void for_each_piece(const TensorView& tensor, const std::vector<Piece>& pieces, F f) {
  const auto per_head = static_cast<std::int64_t>(pieces.size());
  parallel_for(tensor.heads * per_head, [&](std::int64_t task) {
    const Piece piece = pieces[static_cast<std::size_t>(task % per_head)];
    std::vector<float> rows(static_cast<std::size_t>(piece.count * tensor.dim));
    const int head = static_cast<int>(task / per_head);
    tensor.load_head(head, piece.first, piece.count, rows.data());
    f(task, head, piece, rows);
  });
}

}  // namespace

std::vector<MomentSum> second_moments(const TensorView& tensor, const MomentRequest& request) {
  const auto pieces = pieces_of(tensor.tokens, request);
  const auto per_head = static_cast<std::int64_t>(pieces.size());
  const std::span<const float> weights = request.weights;
  const auto tokens = static_cast<std::size_t>(tensor.tokens);
  const bool of_heads = weights.size() == tokens * static_cast<std::size_t>(tensor.heads);
  KVQ_ASSERT(tensor.heads % request.heads_per_group == 0 && (weights.empty() || of_heads || weights.size() == tokens));
  std::vector<MomentSum> partial(static_cast<std::size_t>(tensor.heads * per_head));
  for_each_piece(tensor, pieces, [&](std::int64_t task, int head, Piece piece, const std::vector<float>& rows) {
    MomentSum sum(tensor.dim);
    const std::int64_t at = piece.first + (of_heads ? head * tensor.tokens : 0);
    sum.add(rows, weights.empty()
                      ? weights
                      : weights.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(piece.count)));
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
  for_each_piece(tensor, pieces_of(tensor.tokens, request),
                 [&](std::int64_t, int head, Piece piece, const std::vector<float>& rows) {
                   std::vector<float> product(rows.size());
                   blas::gemm_nn(piece.count, tensor.dim, tensor.dim, rows.data(), tensor.dim,
                                 narrow.data() + static_cast<std::size_t>(head) * d * d, tensor.dim, false,
                                 product.data(), tensor.dim);
                   float* out = forms.data() + head * tensor.tokens + piece.first;
                   for (std::size_t t = 0; t < static_cast<std::size_t>(piece.count); ++t) {
                     double sum = 0.0;
                     for (std::size_t j = 0; j < d; ++j) sum += double{product[t * d + j]} * rows[t * d + j];
                     out[t] = static_cast<float>(std::max(sum, 0.0));
                   }
                 });
  return forms;
}

}  // namespace kvq
