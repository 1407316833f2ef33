#include <kvq/compute/parallel.h>
#include <kvq/eval/float_formats.h>
#include <kvq/eval/float_schemes.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <vector>

namespace kvq {

namespace {

constexpr std::int64_t kPieceTokens = 256;

/// The largest |x| of each head of a tensor.
std::vector<float> largest_by_head(const ActivationTensor& tensor) {
  const std::int64_t pieces = (tensor.tokens + kPieceTokens - 1) / kPieceTokens;
  std::vector<float> partial(static_cast<std::size_t>(pieces * tensor.heads));
  parallel_for(pieces * tensor.heads, [&](std::int64_t task) {
    const std::int64_t first = task % pieces * kPieceTokens, count = std::min(kPieceTokens, tensor.tokens - first);
    std::vector<float> rows(static_cast<std::size_t>(count * tensor.dim));
    tensor.load_head(static_cast<int>(task / pieces), first, count, rows.data());
    float& largest = partial[static_cast<std::size_t>(task)];
    for (const float x : rows) largest = std::max(largest, std::abs(x));
  });
  std::vector<float> heads(static_cast<std::size_t>(tensor.heads));
  for (std::size_t i = 0; i < partial.size(); ++i) {
    float& largest = heads[i / static_cast<std::size_t>(pieces)];
    largest = std::max(largest, partial[i]);
  }
  return heads;
}

/// The largest |x| of each head, of the first tensor that is asked about.
class SeenRange {
 public:
  float of_head(const ActivationTensor& tensor, int head) const { return of(tensor)[static_cast<std::size_t>(head)]; }
  float of_all(const ActivationTensor& tensor) const {
    const std::vector<float>& heads = of(tensor);
    return *std::max_element(heads.begin(), heads.end());
  }

 private:
  const std::vector<float>& of(const ActivationTensor& tensor) const {
    std::call_once(once_, [&] { heads_ = largest_by_head(tensor); });
    return heads_;
  }
  mutable std::once_flag once_;
  mutable std::vector<float> heads_;
};

/// Calls step(number) for pieces of a head's rows, which end at whole rows.
template <typename Step>
void for_pieces(std::span<float> rows, std::size_t dim, const Step& step) {
  const std::size_t size = static_cast<std::size_t>(kPieceTokens) * dim;
  parallel_for(static_cast<std::int64_t>((rows.size() + size - 1) / size), [&](std::int64_t task) {
    const std::size_t begin = static_cast<std::size_t>(task) * size;
    step(rows.subspan(begin, std::min(size, rows.size() - begin)));
  });
}

class Fp8Side : public StoredSide {
 public:
  explicit Fp8Side(Fp8Scale scale) : scale_(scale) {}
  void restore(const ActivationTensor& tensor, std::int64_t, int kv_head, std::span<float> rows) const override {
    const float scale = scale_of(tensor, kv_head);
    for_pieces(rows, 64, [scale](std::span<float> piece) {
      for (float& x : piece) x = round_to(kE4m3, x / scale) * scale;
    });
  }
  double effective_bits(std::int64_t) const override { return 8.0; }
  double code_bits() const override { return 8.0; }

 private:
  float scale_of(const ActivationTensor& tensor, int kv_head) const {
    if (scale_ == Fp8Scale::one) return 1.0f;
    const float largest = scale_ == Fp8Scale::head ? range_.of_head(tensor, kv_head) : range_.of_all(tensor);
    const float scale = largest / kE4m3.largest;
    return scale > 0.0f ? scale : 1.0f;
  }

  Fp8Scale scale_;
  SeenRange range_;
};

class Nvfp4Side : public StoredSide {
 public:
  explicit Nvfp4Side(int dim) : dim_(static_cast<std::size_t>(dim)) {}
  void restore(const ActivationTensor& tensor, std::int64_t, int, std::span<float> rows) const override {
    const float scale = range_.of_all(tensor) / (kE4m3.largest * kE2m1.largest);
    for_pieces(rows, dim_, [&](std::span<float> piece) {
      for (std::size_t row = 0; row < piece.size(); row += dim_)
        for (std::size_t first = 0; first < dim_; first += kBlock)
          restore_block(piece.subspan(row + first, std::min(kBlock, dim_ - first)), scale);
    });
  }
  double effective_bits(std::int64_t) const override {
    const std::size_t blocks = (dim_ + kBlock - 1) / kBlock, code_bytes = (dim_ + 1) / 2;
    return 8.0 * static_cast<double>(code_bytes + blocks) / static_cast<double>(dim_);
  }
  double code_bits() const override { return 4.0; }

 private:
  static constexpr std::size_t kBlock = 16;

  static void restore_block(std::span<float> block, float scale) {
    float largest = 0.0f;
    for (const float x : block) largest = std::max(largest, std::abs(x));
    const float block_scale = scale > 0.0f ? round_to(kE4m3, largest / kE2m1.largest / scale) : 0.0f;
    const float step = block_scale * scale;
    for (float& x : block) x = step > 0.0f ? round_to(kE2m1, x / step) * step : 0.0f;
  }

  std::size_t dim_;
  SeenRange range_;
};

}  // namespace

std::unique_ptr<StoredSide> fp8_side(Fp8Scale scale) { return std::make_unique<Fp8Side>(scale); }

std::unique_ptr<StoredSide> nvfp4_side(int dim) { return std::make_unique<Nvfp4Side>(dim); }

}  // namespace kvq
