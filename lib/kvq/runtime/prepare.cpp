#include <kvq/runtime/prepare.h>

#include <kvq/codec/codec.h>
#include <kvq/core/dtype.h>
#include <kvq/runtime/kernels/decode/rotation_layout.h>
#include <kvq/runtime/kernels/quantize_write/dense_layout.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvq {

int clip_rank(double clip_ratio, int head_dim) {
  if (clip_ratio >= 1.0) return 0;
  return head_dim - std::min(static_cast<int>(std::floor(clip_ratio * head_dim)), head_dim - 1);
}

std::vector<std::int32_t> clip_ranks(const TensorPlan& plan, int num_kv_heads, int head_dim) {
  std::vector<std::int32_t> ranks;
  if (std::any_of(plan.clip_ratio.begin(), plan.clip_ratio.end(), [](double ratio) { return ratio < 1.0; }))
    for (int head = 0; head < num_kv_heads; ++head)
      ranks.push_back(clip_rank(plan.clip_ratio[static_cast<std::size_t>(plan.rotation.head_index(head))], head_dim));
  return ranks;
}

std::vector<float> rotated_center(const TensorPlan& plan, int num_kv_heads, int head_dim) {
  if (plan.center.empty()) return {};
  TensorPlan rotation;
  rotation.rotation = plan.rotation;
  const auto dim = static_cast<std::size_t>(head_dim);
  std::vector<float> rotated(static_cast<std::size_t>(num_kv_heads) * dim);
  for (int head = 0; head < num_kv_heads; ++head)
    rotate_row(rotation, head,
               std::span(plan.center).subspan(static_cast<std::size_t>(plan.rotation.head_index(head)) * dim, dim),
               std::span(rotated).subspan(static_cast<std::size_t>(head) * dim, dim));
  return rotated;
}

std::int64_t packed_rotation_bytes(int head_dim) { return RotationLayout{head_dim}.bytes(); }

Status pack_rotations(std::span<const float> matrices, int head_dim, bool bf16, std::span<std::byte> out) {
  if (head_dim < 32 || head_dim % 32 != 0)
    return Status::fail(StatusCode::unsupported, "pack_rotations: head_dim %d; supported are multiples of 32",
                        head_dim);
  const auto dim = static_cast<std::size_t>(head_dim), count = matrices.size() / (dim * dim);
  const RotationLayout layout{head_dim};
  if (count * dim * dim != matrices.size() || out.size() != count * static_cast<std::size_t>(layout.bytes()))
    return Status::fail(StatusCode::invalid_argument,
                        "pack_rotations: %zu elements into %zu bytes, expected matrices of %d x %d, %d bytes each",
                        matrices.size(), out.size(), head_dim, head_dim, layout.bytes());
  const auto narrow = [&](float x) { return bf16 ? float_to_bf16(x) : float_to_f16(x); };
  const auto widen = [&](std::uint16_t x) { return bf16 ? bf16_to_float(x) : f16_to_float(x); };
  for (std::size_t m = 0; m < count; ++m)
    for (int slab = 0; slab < layout.slabs(); ++slab)
      for (int k = 0; k < RotationLayout::kSlabRows; ++k)
        for (int n = 0; n < head_dim; ++n) {
          const auto row = static_cast<std::size_t>(RotationLayout::row_channel(slab, k));
          const auto column = static_cast<std::size_t>(RotationLayout::column_channel(n));
          const float element = matrices[(m * dim + row) * dim + column];
          const std::uint16_t high = narrow(element), low = narrow(element - widen(high));
          std::byte* to = out.data() + m * static_cast<std::size_t>(layout.bytes());
          std::memcpy(to + layout.offset(slab, 0, k, n), &high, sizeof high);
          std::memcpy(to + layout.offset(slab, 1, k, n), &low, sizeof low);
        }
  return {};
}

std::vector<std::byte> rotation_fragments(std::span<const float> matrices, int head_dim) {
  if (head_dim < 32 || head_dim % 32 != 0) return {};
  const DecodeRotationLayout layout{head_dim};
  const auto dim = static_cast<std::size_t>(head_dim), count = matrices.size() / (dim * dim);
  std::vector<std::byte> all(count * static_cast<std::size_t>(layout.bytes()));
  for (std::size_t m = 0; m < count; ++m)
    for (int row = 0; row < head_dim; ++row)
      for (int column = 0; column < head_dim; ++column) {
        const float element =
            matrices[(m * dim + static_cast<std::size_t>(row)) * dim + static_cast<std::size_t>(column)];
        const std::uint16_t high = float_to_bf16(element), low = float_to_bf16(element - bf16_to_float(high));
        std::byte* to = all.data() + m * static_cast<std::size_t>(layout.bytes());
        std::memcpy(to + layout.offset(row, column, 0), &high, sizeof high);
        std::memcpy(to + layout.offset(row, column, 1), &low, sizeof low);
      }
  return all;
}

}  // namespace kvq
