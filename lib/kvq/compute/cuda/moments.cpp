#include <kvq/compute/cuda/moments.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvq::cuda {

namespace {

/// Tokens of one head that are in double at a time.
constexpr std::int64_t kTokensAtOnce = std::int64_t{kChunkTokens} * 256;

Number number_of(DType type) {
  switch (type) {
    case DType::f16: return Number::f16;
    case DType::bf16: return Number::bf16;
    default: KVQ_ASSERT(type == DType::f32); return Number::f32;
  }
}

std::size_t size(std::int64_t x) { return static_cast<std::size_t>(x); }

}  // namespace

Rows upload_rows(Context& context, Buffer& buffer, const TensorView& tensor, int first_head, int heads,
                 std::int64_t first_token, std::int64_t tokens) {
  const Number type = number_of(tensor.dtype);
  const std::size_t bytes = type == Number::f32 ? 4 : 2, row = size(std::int64_t{heads} * tensor.dim) * bytes,
                    pitch = size(std::int64_t{tensor.heads} * tensor.dim) * bytes;
  std::byte* to = buffer.room<std::byte>(row * size(tokens), "copy of activations");
  const std::byte* from = tensor.data + size(first_token) * pitch + size(std::int64_t{first_head} * tensor.dim) * bytes;
  context.upload_rows(to, from, row, pitch, size(tokens), "copy of activations");
  return {.type = type,
          .data = to,
          .head_stride = tensor.dim,
          .token_stride = std::int64_t{heads} * tensor.dim,
          .tokens = tokens,
          .heads = heads,
          .dim = tensor.dim};
}

void add_moment(Context& context, const Rows& rows, const Weights& weights, MomentSum& into) {
  const std::int64_t dim = rows.dim, square = dim * dim;
  double* total = context.sums.room<double>(size(square + dim), "second moments");
  check(cudaMemsetAsync(total, 0, size(square + dim) * sizeof(double), context.stream()), "second moments");
  for (int head = 0; head < rows.heads; ++head)
    for (std::int64_t first = 0; first < rows.tokens; first += kTokensAtOnce) {
      const std::int64_t count = std::min(kTokensAtOnce, rows.tokens - first);
      const int chunks = static_cast<int>((count + kChunkTokens - 1) / kChunkTokens);
      const std::size_t numbers = size(std::int64_t{chunks} * kChunkTokens * dim);
      double* plain = context.plain.room<double>(numbers, "second moments");
      double* weighted = weights.any() ? context.weighted.room<double>(numbers, "second moments") : plain;
      double* products = context.products.room<double>(size(chunks * square), "second moments");
      double* means = context.means.room<double>(size(chunks * dim), "second moments");
      widen(rows, weights, head, first, count, plain, weights.any() ? weighted : nullptr, context.stream());
      // Row-major [n, D] is column-major [D, n]: each product is plain^T weighted. One head at a time, so that what
      // cuBLAS computes does not depend on the number of heads.
      const double one = 1.0, zero = 0.0;
      const int d = rows.dim;
      check(cublasDgemmStridedBatched(context.blas(), CUBLAS_OP_N, CUBLAS_OP_T, d, d, kChunkTokens, &one, weighted, d,
                                      kChunkTokens * dim, plain, d, kChunkTokens * dim, &zero, products, d, square,
                                      chunks),
            "second moments");
      sum_rows(weighted, chunks, d, means, context.stream());
      add_parts(products, chunks, square, total, context.stream());
      add_parts(means, chunks, dim, total + square, context.stream());
    }
  check(cudaGetLastError(), "second moments");
  const std::vector<double> sums = context.download(total, size(square + dim), "second moments");
  for (std::size_t i = 0; i < size(square); ++i) into.sum[i] += sums[i];
  for (std::size_t j = 0; j < size(dim); ++j) into.mean[j] += sums[size(square) + j];
}

void quadratic_forms(Context& context, const Rows& rows, const Weights& weights, std::span<const double> matrices,
                     float* forms) {
  const std::int64_t dim = rows.dim, square = dim * dim;
  const int d = rows.dim;
  const double* m = context.upload(context.matrices, matrices.data(), matrices.size(), "quadratic forms");
  for (int head = 0; head < rows.heads; ++head)
    for (std::int64_t first = 0; first < rows.tokens; first += kTokensAtOnce) {
      const std::int64_t count = std::min(kTokensAtOnce, rows.tokens - first);
      const std::int64_t padded = (count + kChunkTokens - 1) / kChunkTokens * kChunkTokens;
      double* x = context.plain.room<double>(size(padded * dim), "quadratic forms");
      double* y = context.weighted.room<double>(size(padded * dim), "quadratic forms");
      float* out = context.forms.room<float>(size(count), "quadratic forms");
      widen(rows, weights, head, first, count, x, nullptr, context.stream());
      const double one = 1.0, zero = 0.0;
      check(cublasDgemm(context.blas(), CUBLAS_OP_N, CUBLAS_OP_N, d, static_cast<int>(count), d, &one,
                        m + head * square, d, x, d, &zero, y, d),
            "quadratic forms");
      dot_rows(x, y, count, d, out, context.stream());
      check(cudaGetLastError(), "quadratic forms");
      check(cudaMemcpyAsync(forms + head * rows.tokens + first, out, size(count) * sizeof(float),
                            cudaMemcpyDeviceToHost, context.stream()),
            "quadratic forms");
    }
  check(cudaStreamSynchronize(context.stream()), "quadratic forms");
}

}  // namespace kvq::cuda
