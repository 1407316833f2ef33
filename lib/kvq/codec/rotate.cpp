#include <kvq/codec/codec.h>
#include <kvq/codec/poisoned.h>
#include <kvq/codec/rotation_matrix.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

/// The offset that is subtracted before the rotation: [D] of the center or of a centroid, or empty.
std::span<const float> offset_of(const TensorPlan& plan, std::size_t entry, std::size_t dim, int centroid) {
  if (!plan.center.empty()) return std::span(plan.center).subspan(entry * dim, dim);
  if (!plan.centroids) return {};
  KVQ_ASSERT(centroid >= 0 && centroid < plan.centroids->count);
  return std::span(plan.centroids->values)
      .subspan((entry * static_cast<std::size_t>(plan.centroids->count) + static_cast<std::size_t>(centroid)) * dim,
               dim);
}

/// out[i] = sum of y[j] r[i][j], j = 0, 1, ... Eight sums at a time, because each waits for its last addition.
void multiply(const float* r, std::span<const double> y, std::span<double> out) {
  constexpr std::size_t kSums = 8;
  const std::size_t d = y.size(), whole = d / kSums * kSums;
  const double* factors = y.data();
  for (std::size_t i = 0; i < whole; i += kSums) {
    double sums[kSums] = {};
    for (std::size_t j = 0; j < d; ++j)
      for (std::size_t k = 0; k < kSums; ++k) sums[k] += factors[j] * double{r[(i + k) * d + j]};
    std::copy_n(sums, kSums, out.begin() + static_cast<std::ptrdiff_t>(i));
  }
  for (std::size_t i = whole; i < d; ++i) {
    out[i] = 0.0;
    for (std::size_t j = 0; j < d; ++j) out[i] += factors[j] * double{r[i * d + j]};
  }
}

}  // namespace

void rotate_row(const TensorPlan& plan, int kv_head, std::span<const float> x, std::span<float> x_rot, int centroid) {
  const std::size_t d = x.size();
  const auto h = static_cast<std::size_t>(plan.rotation.head_index(kv_head));
  KVQ_ASSERT(x_rot.size() == d);
  std::vector<double> y(x.begin(), x.end());
  if (const auto offset = offset_of(plan, h, d, centroid); !offset.empty())
    for (std::size_t j = 0; j < d; ++j) y[j] = x[j] - offset[j];  // float32, as the formula says
  if (!plan.rotation.channel_scale.empty())
    for (std::size_t j = 0; j < d; ++j) y[j] *= double{plan.rotation.channel_scale[h * d + j]};
  if (plan.rotation.kind == RotationKind::block_hadamard) {
    if (!plan.rotation.signs.empty())
      for (std::size_t j = 0; j < d; ++j) y[j] *= plan.rotation.signs[h * d + j];
    block_hadamard(y, static_cast<std::size_t>(plan.rotation.order));
  } else if (plan.rotation.kind == RotationKind::dense) {
    const float* r = plan.rotation.matrix.data() + h * d * d;
    std::vector<double> out(d, 0.0);
    for (std::size_t i = 0; i < d; ++i)
      for (std::size_t j = 0; j < d; ++j) out[j] += y[i] * r[i * d + j];
    y.swap(out);
  }
  for (std::size_t j = 0; j < d; ++j) x_rot[j] = static_cast<float>(y[j]);
}

void unrotate_row(const TensorPlan& plan, int kv_head, std::span<const float> x_rot, std::span<float> x, int centroid) {
  const std::size_t d = x.size();
  const auto h = static_cast<std::size_t>(plan.rotation.head_index(kv_head));
  KVQ_ASSERT(x_rot.size() == d);
  std::vector<double> y(x_rot.begin(), x_rot.end());
  if (plan.rotation.kind == RotationKind::block_hadamard) {
    block_hadamard(y, static_cast<std::size_t>(plan.rotation.order));  // symmetric and orthogonal: its own inverse
    if (!plan.rotation.signs.empty())
      for (std::size_t j = 0; j < d; ++j) y[j] *= plan.rotation.signs[h * d + j];
  } else if (plan.rotation.kind == RotationKind::dense) {
    std::vector<double> out(d, 0.0);
    if (plan.rotation.inverse.empty()) {
      multiply(plan.rotation.matrix.data() + h * d * d, y, out);
    } else {
      const float* r = plan.rotation.inverse.data() + h * d * d;
      for (std::size_t j = 0; j < d; ++j)
        for (std::size_t i = 0; i < d; ++i) out[i] += y[j] * double{r[j * d + i]};
    }
    y.swap(out);
  }
  if (!plan.rotation.channel_scale.empty())
    for (std::size_t j = 0; j < d; ++j) y[j] /= double{plan.rotation.channel_scale[h * d + j]};
  const auto offset = offset_of(plan, h, d, centroid);
  for (std::size_t j = 0; j < d; ++j) x[j] = static_cast<float>(y[j] + (offset.empty() ? 0.0 : double{offset[j]}));
}

namespace {

void reconstruct_row(const TensorPlan& plan, const RowCodec& codec, int kv_head, int centroid, std::span<float> row) {
  std::vector<float> rotated(row.size());
  rotate_row(plan, kv_head, row, rotated, centroid);
  expect_finite(rotated);
  codec.quantize(rotated);
  unrotate_row(plan, kv_head, rotated, row, centroid);
}

}  // namespace

void reconstruct(const TensorPlan& plan, int kv_head, std::span<float> x, int dim) {
  KVQ_ASSERT(!plan.centroids || !plan.centroids->joint);
  const auto d = static_cast<std::size_t>(dim);
  const RowCodec codec(plan, kv_head, dim);
  for (std::size_t t = 0; t < x.size() / d; ++t) {
    const auto row = x.subspan(t * d, d);
    const int centroid = plan.centroids ? nearest_centroid(*plan.centroids, plan.rotation.head_index(kv_head), row) : 0;
    reconstruct_row(plan, codec, kv_head, centroid, row);
  }
}

void reconstruct_heads(const TensorPlan& plan, int num_kv_heads, std::span<float> x, int dim) {
  const auto d = static_cast<std::size_t>(dim), heads = static_cast<std::size_t>(num_kv_heads);
  const std::size_t tokens = x.size() / (heads * d);
  const auto row = [&](std::size_t head, std::size_t token) { return x.subspan((head * tokens + token) * d, d); };
  if (!plan.centroids || !plan.centroids->joint) {
    for (int h = 0; h < num_kv_heads; ++h)
      reconstruct(plan, h, x.subspan(static_cast<std::size_t>(h) * tokens * d, tokens * d), dim);
    return;
  }
  std::vector<RowCodec> codecs;
  codecs.reserve(static_cast<std::size_t>(num_kv_heads));
  for (int h = 0; h < num_kv_heads; ++h) codecs.emplace_back(plan, h, dim);
  for (std::size_t t = 0; t < tokens; ++t) {
    std::vector<float> sums(static_cast<std::size_t>(plan.centroids->count), 0.0f);
    for (std::size_t h = 0; h < heads; ++h)
      add_centroid_distances(*plan.centroids, plan.rotation.head_index(static_cast<int>(h)), row(h, t), sums);
    const auto centroid = static_cast<int>(std::min_element(sums.begin(), sums.end()) - sums.begin());
    for (std::size_t h = 0; h < heads; ++h) reconstruct_row(plan, codecs[h], static_cast<int>(h), centroid, row(h, t));
  }
}

}  // namespace kvq
