#include <kvq/codec/codec.h>
#include <kvq/codec/poisoned.h>
#include <kvq/compute/parallel.h>
#include <kvq/eval/kivi.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace kvq {

namespace {

constexpr std::size_t kGroup = 32;
constexpr double kNumberBits = 32.0;  // scale and minimum of a group

UniformCoder coder_of(int bits, std::size_t channels) {
  return {.bits = bits, .group_size = static_cast<int>(channels)};
}

/// Quantizes with a given range, scale and minimum rounded as in packing.md (a). Numbers may lie outside of the range.
struct Range {
  float scale = 0.0f, minimum = 0.0f, top = 0.0f;
  Range(float lo, float hi, int bits)
      : scale(round_to(ScaleType::fp16, (hi - lo) / static_cast<float>((1 << bits) - 1))),
        minimum(round_to(ScaleType::fp16, lo)),
        top(static_cast<float>((1 << bits) - 1)) {}
  float restored(float x) const {
    if (scale == 0.0f) return minimum;
    return std::clamp(std::floor((x - minimum) / scale + 0.5f), 0.0f, top) * scale + minimum;
  }
};

class KiviKeys : public StoredSide {
 public:
  /// @param residual  0: no token is exact
  KiviKeys(int dim, int bits, int residual, bool scale_only)
      : dim_(static_cast<std::size_t>(dim)), bits_(bits), residual_(residual), scale_only_(scale_only) {}

  void restore(const ActivationTensor&, std::int64_t, int, std::span<float> rows) const override {
    parallel_for(static_cast<std::int64_t>(dim_),
                 [&](std::int64_t channel) { restore_channel(rows, static_cast<std::size_t>(channel)); });
  }
  ExactTokens exact_tokens() const override {
    if (residual_ == 0) return {};
    return {.sink = 0, .recent = 1, .granule = residual_};
  }
  double effective_bits(std::int64_t context) const override {
    if (residual_ == 0) {  // a group that is not full has its range, too
      if (context <= 0) return bits_ + kNumberBits / kGroup;
      const auto group = static_cast<std::int64_t>(kGroup);
      const std::int64_t groups = (context + group - 1) / group;
      return bits_ + kNumberBits * static_cast<double>(groups) / static_cast<double>(context);
    }
    const double coded =
        context <= 0 ? 1.0 : static_cast<double>(exact_tokens().coded_end(context - 1)) / static_cast<double>(context);
    return 16.0 + coded * (bits_ + kNumberBits / kGroup - 16.0);
  }
  double code_bits() const override { return bits_; }

 private:
  /// The last group, if not full, has its own range; with exact tokens no query reads this group as codes.
  void restore_channel(std::span<float> rows, std::size_t channel) const {
    const std::size_t tokens = rows.size() / dim_;
    float lo = 0.0f, hi = 0.0f;
    for (std::size_t first = 0; first < tokens; first += kGroup) {
      const std::size_t end = std::min(tokens, first + kGroup);
      float own_lo = rows[first * dim_ + channel], own_hi = own_lo;
      for (std::size_t t = first; t < end; ++t) {
        own_lo = std::min(own_lo, rows[t * dim_ + channel]);
        own_hi = std::max(own_hi, rows[t * dim_ + channel]);
      }
      const Range range = scale_only_ && first > 0 ? Range(lo, hi, bits_) : Range(own_lo, own_hi, bits_);
      for (std::size_t t = first; t < end; ++t) rows[t * dim_ + channel] = range.restored(rows[t * dim_ + channel]);
      lo = own_lo, hi = own_hi;
    }
  }

  std::size_t dim_;
  int bits_;
  int residual_;
  bool scale_only_;
};

class KiviValues : public StoredSide {
 public:
  /// @param residual  0: no token is exact
  KiviValues(int dim, int bits, int residual) : dim_(static_cast<std::size_t>(dim)), bits_(bits), residual_(residual) {}

  void restore(const ActivationTensor&, std::int64_t, int, std::span<float> rows) const override {
    parallel_for(static_cast<std::int64_t>(rows.size() / dim_), [&](std::int64_t token) {
      const auto row = rows.subspan(static_cast<std::size_t>(token) * dim_, dim_);
      expect_finite(row);
      for (std::size_t first = 0; first < dim_; first += kGroup) {
        const std::size_t count = std::min(kGroup, dim_ - first);
        quantize_row(coder_of(bits_, count), 1.0, row.subspan(first, count));
      }
    });
  }
  ExactTokens exact_tokens() const override {
    if (residual_ == 0) return {};
    return {.sink = 0, .recent = residual_ + 1, .granule = 1};
  }
  double effective_bits(std::int64_t context) const override {
    const double coded =
        context <= 0 ? 1.0 : static_cast<double>(exact_tokens().coded_end(context - 1)) / static_cast<double>(context);
    const std::size_t groups = (dim_ + kGroup - 1) / kGroup;
    return 16.0 + coded * (bits_ + kNumberBits * static_cast<double>(groups) / static_cast<double>(dim_) - 16.0);
  }
  double code_bits() const override { return bits_; }

 private:
  std::size_t dim_;
  int bits_;
  int residual_;
};

}  // namespace

std::unique_ptr<StoredSide> kivi_keys(int dim, int bits, int residual, bool with_windows) {
  return std::make_unique<KiviKeys>(dim, bits, with_windows ? residual : 0, false);
}
std::unique_ptr<StoredSide> kivi_values(int dim, int bits, int residual, bool with_windows) {
  return std::make_unique<KiviValues>(dim, bits, with_windows ? residual : 0);
}
std::unique_ptr<StoredSide> kivi_scale_only_keys(int dim, int bits) {
  return std::make_unique<KiviKeys>(dim, bits, 0, true);
}

}  // namespace kvq
