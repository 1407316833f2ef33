#include <kvq/compute/cuda/moments.h>
#include <kvq/compute/device_bytes.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvq::cuda {

namespace {

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

namespace {

constexpr const char* kMoments = "second moments";
constexpr const char* kForms = "quadratic forms";

std::int64_t number_bytes(const TensorView& tensor) { return tensor.dtype == DType::f32 ? 4 : 2; }

/// A second moment that is summed on the device: the sum [D, D], then the mean [D].
class DeviceMoment {
 public:
  DeviceMoment(Context& context, int dim) : context_(context), dim_(dim), square_(std::int64_t{dim} * dim) {
    total_ = context.sums.room<double>(numbers(), kMoments);
    check(cudaMemsetAsync(total_, 0, numbers() * sizeof(double), context.stream()), kMoments);
  }

  /// All heads of `rows` in order, a piece of kTokensAtOnce tokens after another.
  void add(const Rows& rows, const Weights& weights) const {
    for (int head = 0; head < rows.heads; ++head)
      for (std::int64_t first = 0; first < rows.tokens; first += kTokensAtOnce)
        add_piece(rows, weights, head, first, std::min(kTokensAtOnce, rows.tokens - first));
    check(cudaGetLastError(), kMoments);
  }

  void add_to(MomentSum& into) const {
    const std::vector<double> sums = context_.download(total_, numbers(), kMoments);
    for (std::size_t i = 0; i < size(square_); ++i) into.sum[i] += sums[i];
    for (std::size_t j = 0; j < size(dim_); ++j) into.mean[j] += sums[size(square_) + j];
  }

 private:
  std::size_t numbers() const { return size(square_ + dim_); }

  void add_piece(const Rows& rows, const Weights& weights, int head, std::int64_t first, std::int64_t count) const {
    const int chunks = static_cast<int>((count + kChunkTokens - 1) / kChunkTokens), d = dim_;
    const std::size_t widened = size(std::int64_t{chunks} * kChunkTokens * dim_);
    double* plain = context_.plain.room<double>(widened, kMoments);
    double* weighted = weights.any() ? context_.weighted.room<double>(widened, kMoments) : plain;
    const std::int64_t part = square_ + dim_;  // the product of a chunk, then the sum of its rows
    double* parts = context_.products.room<double>(size(chunks * part), kMoments);
    widen(rows, weights, head, first, count, plain, weights.any() ? weighted : nullptr, context_.stream());
    // Row-major [n, D] is column-major [D, n]: each product is plain^T weighted. One head at a time, so that what
    // cuBLAS computes does not depend on the number of heads.
    const double one = 1.0, zero = 0.0;
    const std::int64_t stride = std::int64_t{kChunkTokens} * dim_;
    check(cublasDgemmStridedBatched(context_.blas(), CUBLAS_OP_N, CUBLAS_OP_T, d, d, kChunkTokens, &one, weighted, d,
                                    stride, plain, d, stride, &zero, parts, d, part, chunks),
          kMoments);
    sum_rows(weighted, chunks, d, parts + square_, part, context_.stream());
    add_parts(parts, chunks, part, total_, context_.stream());
  }

  Context& context_;
  const int dim_;
  const std::int64_t square_;
  double* total_ = nullptr;
};

/// Tokens of some heads on the device, and their weights.
struct Piece {
  Rows rows;
  Weights weights;
};
/// Puts tokens [first_token, first_token + tokens) of heads [head, head + heads) on the device.
Piece upload_piece(Context& context, const TensorView& rows, const MomentRequest& request, int head, int heads,
                   std::int64_t first_token, std::int64_t tokens) {
  Piece piece{.rows = cuda::upload_rows(context, context.rows, rows, head, heads, first_token, tokens)};
  piece.weights.skipped_first = request.skipped_first - first_token;
  piece.weights.skipped_end = piece.weights.skipped_first + request.skipped_count;
  if (request.weights.empty()) return piece;
  const bool shared = request.weights.size() == size(rows.tokens);
  const float* from = request.weights.data() + (shared ? 0 : head * rows.tokens) + first_token;
  const std::size_t each = size(tokens), all = size(rows.tokens);
  float* to = context.weights.room<float>(each * size(shared ? 1 : heads), kMoments);
  context.upload_rows(reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from), each * sizeof(float),
                      all * sizeof(float), shared ? 1 : size(heads), kMoments);
  piece.weights.of_tokens = to;
  piece.weights.head_stride = shared ? 0 : tokens;
  return piece;
}

}  // namespace

void add_moment(Context& context, const Rows& rows, const Weights& weights, MomentSum& into) {
  const DeviceMoment moment(context, rows.dim);
  moment.add(rows, weights);
  moment.add_to(into);
}

void second_moments(Context& context, const TensorView& rows, const MomentRequest& request, int first, int count,
                    std::span<MomentSum> sums) {
  const int each = request.heads_per_group;
  const MomentShape shape{.tokens = rows.tokens,
                          .dim = rows.dim,
                          .heads_per_group = each,
                          .number_bytes = number_bytes(rows),
                          .weighted = !request.weights.empty()};
  const Claim claim(context.lane, moment_need(shape, count));
  const std::int64_t fixed = moment_bytes(rows.tokens, rows.dim, shape.weighted),
                     of_group = each * shape.head_bytes(rows.tokens);
  if (fixed + of_group <= claim.bytes()) {
    const int at_once = static_cast<int>(units_at_once(claim.bytes(), fixed, of_group, count));
    for (int g = first; g < first + count; g += at_once) {
      const int groups = std::min(at_once, first + count - g);
      const Piece piece = upload_piece(context, rows, request, g * each, groups * each, 0, rows.tokens);
      for (int i = 0; i < groups; ++i) {
        Rows group = piece.rows.head(i * each);
        group.heads = each;
        Weights weights = piece.weights;
        if (weights.of_tokens) weights.of_tokens += i * each * weights.head_stride;
        add_moment(context, group, weights, sums[size(g + i)]);
      }
    }
    return;
  }
  // The same pieces in the same order, each of them uploaded alone.
  for (int g = first; g < first + count; ++g) {
    const DeviceMoment moment(context, rows.dim);
    for (int head = g * each; head < (g + 1) * each; ++head)
      for (std::int64_t token = 0; token < rows.tokens; token += kTokensAtOnce) {
        const std::int64_t tokens = std::min(kTokensAtOnce, rows.tokens - token);
        const Piece piece = upload_piece(context, rows, request, head, 1, token, tokens);
        moment.add(piece.rows, piece.weights);
      }
    moment.add_to(sums[size(g)]);
  }
}

void quadratic_forms(Context& context, const TensorView& rows, std::span<const double> matrices,
                     const MomentRequest& request, int first, int count, std::span<float> forms) {
  const int d = rows.dim;
  const std::int64_t dim = d, square = dim * dim, most = std::min(rows.tokens, kTokensAtOnce),
                     bytes = form_bytes(rows.tokens, dim) + 8 * square + most * number_bytes(rows) * dim;
  const Claim claim(context.lane, {bytes, bytes, kForms});
  for (int head = first; head < first + count; ++head) {
    const double* m = context.upload(context.matrices, matrices.data() + head * square, size(square), kForms);
    for (std::int64_t token = 0; token < rows.tokens; token += kTokensAtOnce) {
      const std::int64_t tokens = std::min(kTokensAtOnce, rows.tokens - token);
      const Rows piece = upload_rows(context, context.rows, rows, head, 1, token, tokens);
      const Weights skipped{.skipped_first = request.skipped_first - token,
                            .skipped_end = request.skipped_first + request.skipped_count - token};
      double* x = context.plain.room<double>(size(padded_tokens(tokens) * dim), kForms);
      double* y = context.weighted.room<double>(size(padded_tokens(tokens) * dim), kForms);
      float* out = context.forms.room<float>(size(tokens), kForms);
      widen(piece, skipped, 0, 0, tokens, x, nullptr, context.stream());
      const double one = 1.0, zero = 0.0;
      check(cublasDgemm(context.blas(), CUBLAS_OP_N, CUBLAS_OP_N, d, static_cast<int>(tokens), d, &one, m, d, x, d,
                        &zero, y, d),
            kForms);
      dot_rows(x, y, tokens, d, out, context.stream());
      check(cudaGetLastError(), kForms);
      check(cudaMemcpyAsync(forms.data() + head * rows.tokens + token, out, size(tokens) * sizeof(float),
                            cudaMemcpyDeviceToHost, context.stream()),
            kForms);
    }
  }
  check(cudaStreamSynchronize(context.stream()), kForms);
}

}  // namespace kvq::cuda
