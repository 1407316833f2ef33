#include "decode_check.h"

#include "reference.h"

#include <kvq/codec/codec.h>
#include <kvq/codec/page_codec.h>

#include <algorithm>
#include <cmath>

namespace kvq::bench {

namespace {

/// Rows of one side and head, decoded, still rotated.
class Rows {
 public:
  Rows(const DecodeCase& c, const WindowLayout& windows, const HostSequence& sequence, CacheSide which, int head)
      : c_(c),
        windows_(windows),
        sequence_(sequence),
        which_(which),
        head_(head),
        layout_{c.variant->k, c.variant->v, c.num_kv_heads, c.page_size},
        side_(which == CacheSide::k ? c.variant->k : c.variant->v),
        bfloat_(which == CacheSide::k ? c.variant->k_bfloat : c.variant->v_bfloat),
        row_(static_cast<std::size_t>(side_.head_dim)),
        codes_(row_.size()),
        numbers_(static_cast<std::size_t>(side_.groups() * side_.numbers)) {}

  std::span<const float> at(int position) {
    if (position < c_.sink_tokens || position >= c_.context - c_.recent_tokens) {
      load_window_row(windows_, which_, head_, windows_.row(position, c_.sink_tokens), sequence_.window, row_);
      return row_;
    }
    const auto bytes = static_cast<std::size_t>(layout_.page_bytes());
    const auto page =
        std::span(sequence_.pages).subspan(static_cast<std::size_t>(position / c_.page_size) * bytes, bytes);
    const int slot = position % c_.page_size;
    if (side_.exact()) {
      load_page_row(layout_, which_, head_, slot, page, row_);
    } else {
      load_page_row(layout_, which_, number_type(bfloat_), head_, slot, page, codes_, numbers_);
      decode_row(coder_of(side_, bfloat_), codes_, numbers_, row_);
    }
    return row_;
  }

 private:
  const DecodeCase& c_;
  const WindowLayout& windows_;
  const HostSequence& sequence_;
  CacheSide which_;
  int head_;
  PageLayout layout_;
  TileSide side_;
  bool bfloat_;
  std::vector<float> row_;
  std::vector<std::uint8_t> codes_;
  std::vector<float> numbers_;
};

}  // namespace

std::vector<double> plain_decode(const DecodeCase& c, const WindowLayout& windows, const HostSequence& sequence,
                                 int kv_head, const TensorPlan& rotation_k, const TensorPlan& rotation_v,
                                 std::span<const float> q, double softmax_scale) {
  const auto dim = static_cast<std::size_t>(c.variant->k.head_dim), heads = q.size() / dim,
             tokens = static_cast<std::size_t>(c.context);
  std::vector<float> rotated(q.size());
  for (std::size_t h = 0; h < heads; ++h)
    rotate_row(rotation_k, 0, q.subspan(h * dim, dim), std::span(rotated).subspan(h * dim, dim));
  std::vector<double> weights(heads * tokens), sums(heads, 0.0), values(heads * dim, 0.0);
  Rows keys(c, windows, sequence, CacheSide::k, kv_head);
  for (std::size_t t = 0; t < tokens; ++t) {
    const std::span<const float> k = keys.at(static_cast<int>(t));
    for (std::size_t h = 0; h < heads; ++h) {
      double dot = 0.0;
      for (std::size_t i = 0; i < dim; ++i)
        dot += static_cast<double>(rotated[h * dim + i]) * static_cast<double>(k[i]);
      weights[h * tokens + t] = softmax_scale * dot;
    }
  }
  for (std::size_t h = 0; h < heads; ++h) {
    const auto row = std::span(weights).subspan(h * tokens, tokens);
    const double most = *std::max_element(row.begin(), row.end());
    for (double& w : row) sums[h] += w = std::exp(w - most);
  }
  Rows stored(c, windows, sequence, CacheSide::v, kv_head);
  for (std::size_t t = 0; t < tokens; ++t) {
    const std::span<const float> v = stored.at(static_cast<int>(t));
    for (std::size_t h = 0; h < heads; ++h) {
      const double w = weights[h * tokens + t] / sums[h];
      for (std::size_t i = 0; i < dim; ++i) values[h * dim + i] += w * static_cast<double>(v[i]);
    }
  }
  std::vector<float> row(dim), unrotated(dim);
  for (std::size_t h = 0; h < heads; ++h) {
    std::transform(values.begin() + static_cast<std::ptrdiff_t>(h * dim),
                   values.begin() + static_cast<std::ptrdiff_t>((h + 1) * dim), row.begin(),
                   [](double x) { return static_cast<float>(x); });
    unrotate_row(rotation_v, 0, row, unrotated);
    std::copy(unrotated.begin(), unrotated.end(), values.begin() + static_cast<std::ptrdiff_t>(h * dim));
  }
  return values;
}

}  // namespace kvq::bench
