#include <kvq/runtime/prepare.h>

#include <kvq/codec/codec.h>
#include <kvq/core/dtype.h>
#include <kvq/core/error.h>
#include <kvq/runtime/kernels/decode/rotation_layout.h>
#include <kvq/runtime/kernels/dequantize/linear_layout.h>
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

Status pack_rotations(std::span<const float> matrices, int head_dim, bool bf16, std::span<std::byte> out,
                      std::span<const float> row_scales) {
  if (head_dim < 32 || head_dim % 32 != 0)
    return Status::fail(StatusCode::unsupported, "pack_rotations: head_dim %d; supported are multiples of 32",
                        head_dim);
  const auto dim = static_cast<std::size_t>(head_dim), count = matrices.size() / (dim * dim);
  const RotationLayout layout{head_dim};
  if (count * dim * dim != matrices.size() || out.size() != count * static_cast<std::size_t>(layout.bytes()))
    return Status::fail(StatusCode::invalid_argument,
                        "pack_rotations: %zu elements into %zu bytes, expected matrices of %d x %d, %d bytes each",
                        matrices.size(), out.size(), head_dim, head_dim, layout.bytes());
  if (!row_scales.empty() && row_scales.size() != count)
    return Status::fail(StatusCode::invalid_argument, "pack_rotations: %zu row scales for %zu matrices",
                        row_scales.size(), count);
  const auto narrow = [&](float x) { return bf16 ? float_to_bf16(x) : float_to_f16(x); };
  const auto widen = [&](std::uint16_t x) { return bf16 ? bf16_to_float(x) : f16_to_float(x); };
  for (std::size_t m = 0; m < count; ++m)
    for (int slab = 0; slab < layout.slabs(); ++slab)
      for (int k = 0; k < RotationLayout::kSlabRows; ++k)
        for (int n = 0; n < head_dim; ++n) {
          const auto row = static_cast<std::size_t>(RotationLayout::row_channel(slab, k));
          const auto column = static_cast<std::size_t>(RotationLayout::column_channel(n));
          const float element = matrices[(m * dim + row) * dim + column] / (row_scales.empty() ? 1.0f : row_scales[m]);
          const std::uint16_t high = narrow(element), low = narrow(element - widen(high));
          std::byte* to = out.data() + m * static_cast<std::size_t>(layout.bytes());
          std::memcpy(to + layout.offset(slab, 0, k, n), &high, sizeof high);
          std::memcpy(to + layout.offset(slab, 1, k, n), &low, sizeof low);
        }
  return {};
}

namespace {

/// The power of two in (x, 2 x].
float power_above(float x) {
  int exponent = 0;
  std::frexp(x, &exponent);
  return std::ldexp(1.0f, exponent);
}

}  // namespace

std::vector<float> fp16_row_scales(std::span<const float> matrices, int head_dim) {
  const auto each = static_cast<std::size_t>(head_dim) * static_cast<std::size_t>(head_dim);
  std::vector<float> row_scales;
  for (std::size_t first = 0; first < matrices.size(); first += each) {
    float largest = 0.0f;
    for (const float x : matrices.subspan(first, each)) largest = std::max(largest, std::abs(x));
    row_scales.push_back(power_above(largest) * 0x1p-14f);
  }
  return row_scales;
}

WriteFactors write_factors(const Rotation& rotation, int head_dim, bool bf16) {
  const auto dim = static_cast<std::size_t>(head_dim);
  WriteFactors write;
  for (std::size_t first = 0; first < rotation.channel_scale.size(); first += dim) {
    const auto scales = std::span(rotation.channel_scale).subspan(first, dim);
    int exponents = 0;
    for (const float scale : scales) exponents += std::ilogb(scale);
    const float row_scale = std::ldexp(1.0f, static_cast<int>(std::lround(exponents / static_cast<double>(dim))));
    const auto [least, most] = std::minmax_element(scales.begin(), scales.end());
    if (!bf16 && (*least / row_scale < 0x1p-24f || *most / row_scale > 0x1p15f))
      throw Error{ErrorKind::unsupported,
                  fmt::format("channel_scale: with fp16 activations scales are supported from 2^-24 to 2^15 times a "
                              "head's geometric mean, found {} to {} about {} in entry {}",
                              *least, *most, row_scale, first / dim)};
    write.row_scales.push_back(row_scale);
    for (std::size_t i = 0; i < dim; ++i) {
      const float sign = rotation.signs.empty() ? 1.0f : static_cast<float>(rotation.signs[first + i]);
      const float factor = sign * scales[i] / row_scale;
      write.factors.push_back(bf16 ? float_to_bf16(factor) : float_to_f16(factor));
    }
  }
  return write;
}

std::vector<float> read_factors(const Rotation& rotation) {
  std::vector<float> factors;
  for (std::size_t i = 0; i < rotation.channel_scale.size(); ++i) {
    const float sign = rotation.signs.empty() ? 1.0f : static_cast<float>(rotation.signs[i]);
    factors.push_back(sign / rotation.channel_scale[i]);
  }
  return factors;
}

std::vector<float> column_sizes(std::span<const float> inverses, int head_dim) {
  const auto dim = static_cast<std::size_t>(head_dim);
  std::vector<float> sizes;
  for (std::size_t first = 0; first < inverses.size(); first += dim * dim)
    for (std::size_t column = 0; column < dim; ++column) {
      float largest = 0.0f;
      for (std::size_t row = 0; row < dim; ++row)
        largest = std::max(largest, std::abs(inverses[first + row * dim + column]));
      sizes.push_back(power_above(largest));
    }
  return sizes;
}

std::vector<std::byte> rotation_fragments(std::span<const float> matrices, int head_dim) {
  if (head_dim < 32 || head_dim % 32 != 0) return {};
  const DecodeRotationLayout layout{head_dim};
  const auto dim = static_cast<std::size_t>(head_dim);
  const std::size_t size = dim * dim, count = matrices.size() / size, bytes = static_cast<std::size_t>(layout.bytes());
  std::vector<std::byte> all(count * bytes);
  for (std::size_t m = 0; m < count; ++m)
    for (int row = 0; row < head_dim; ++row)
      for (int column = 0; column < head_dim; ++column) {
        const float element =
            matrices[m * size + static_cast<std::size_t>(row) * dim + static_cast<std::size_t>(column)];
        const std::uint16_t high = float_to_bf16(element), low = float_to_bf16(element - bf16_to_float(high));
        std::byte* to = all.data() + m * bytes;
        std::memcpy(to + layout.offset(row, column, 0), &high, sizeof high);
        std::memcpy(to + layout.offset(row, column, 1), &low, sizeof low);
      }
  return all;
}

namespace {

/// R of each head, the identity if there is none.
std::vector<float> rotations_or_identity(std::span<const float> matrices, std::size_t heads, std::size_t dim) {
  std::vector<float> all(matrices.begin(), matrices.end());
  if (!all.empty()) return all;
  all.resize(heads * dim * dim);
  for (std::size_t i = 0; i < heads * dim; ++i) all[i / dim * dim * dim + i % dim * (dim + 1)] = 1.0f;
  return all;
}

}  // namespace

HostTaps linear_taps(std::span<const float> bases, int head_dim, int row_bits, bool value) {
  const auto dim = static_cast<std::size_t>(head_dim), bits = static_cast<std::size_t>(row_bits),
             heads = bases.size() / (dim * bits), outputs = value ? dim : bits;
  std::vector<std::uint16_t> place_of_bit(bits);
  for (int place = 0; place < value_places(row_bits / 32); ++place)
    if (const int x = value_bit_of_place(place); x < row_bits)
      place_of_bit[static_cast<std::size_t>(x)] = static_cast<std::uint16_t>(place);
  struct Tap {
    float weight;
    std::uint16_t source;
  };
  std::vector<std::vector<Tap>> taps(heads * outputs);  // of each output
  for (std::size_t h = 0; h < heads; ++h)
    for (std::size_t c = 0; c < dim; ++c)
      for (std::size_t x = 0; x < bits; ++x)
        if (const float weight = bases[(h * dim + c) * bits + x]; weight != 0.0f)
          taps[h * outputs + (value ? c : x)].push_back(
              {weight, value ? place_of_bit[x] : static_cast<std::uint16_t>(c)});
  std::size_t count = 1;  // rows without bits have zeros
  for (const auto& of_output : taps) count = std::max(count, of_output.size());
  HostTaps all{.count = static_cast<int>(count)};
  for (std::size_t h = 0; h < heads; ++h)
    for (std::size_t i = 0; i < count; ++i)
      for (std::size_t output = 0; output < outputs; ++output) {
        const std::vector<Tap>& of_output = taps[h * outputs + output];
        const Tap tap = i < of_output.size() ? of_output[i] : Tap{};
        all.weights.push_back(tap.weight), all.sources.push_back(tap.source);
      }
  return all;
}

std::vector<std::byte> row_matrices(std::size_t entries, std::span<const float> inverses, std::span<const float> bases,
                                    int head_dim, int row_words, bool value) {
  if (head_dim % LinearRowsLayout::kColumns != 0) return {};
  const LinearRowsLayout layout{head_dim, row_words};
  const auto dim = static_cast<std::size_t>(head_dim), bits = static_cast<std::size_t>(32 * row_words),
             bytes = static_cast<std::size_t>(layout.bytes());
  const std::vector<float> all = rotations_or_identity(inverses, entries, dim);
  std::vector<std::byte> out(entries * bytes);
  std::vector<double> of_bits(bits * dim);
  for (std::size_t h = 0; h < entries; ++h) {
    const std::span inverse = std::span(all).subspan(h * dim * dim, dim * dim);
    std::fill(of_bits.begin(), of_bits.end(), 0.0);
    for (std::size_t c = 0; c < dim; ++c)
      for (std::size_t x = 0; x < bits; ++x)
        // A bit matters to a few channels.
        if (const auto weight = static_cast<double>(bases[(h * dim + c) * bits + x]); weight != 0.0)
          for (std::size_t i = 0; i < dim; ++i)
            of_bits[x * dim + i] += weight * static_cast<double>(inverse[c * dim + i]);
    for (int column = 0; column < head_dim; ++column) {
      constexpr int kColumns = LinearRowsLayout::kColumns;
      std::byte* block = out.data() + h * bytes + static_cast<std::size_t>(column / kColumns * layout.block_bytes());
      const int in_block = column % kColumns;
      // A row of bits, then of channels: the element, and the column's factor in this part.
      const auto put_part = [&](int part, int first_turn, int turns, auto element) {
        double largest = 0.0;
        const auto for_rows = [&](auto visit) {
          for (int turn = 0; turn < turns; ++turn)
            for (int row = 0; row < 32; ++row) visit(turn, row / 16, row % 16);
        };
        for_rows([&](int turn, int step, int row) { largest = std::max(largest, std::abs(element(turn, step, row))); });
        const float factor = power_above(static_cast<float>(largest));
        std::memcpy(block + layout.factor_offset(part, in_block), &factor, sizeof factor);
        for_rows([&](int turn, int step, int row) {
          const std::uint16_t rounded =
              float_to_f16(static_cast<float>(element(turn, step, row) / static_cast<double>(factor)));
          std::memcpy(block + LinearRowsLayout::offset(first_turn + turn, step, row, in_block), &rounded,
                      sizeof rounded);
        });
      };
      const auto i = static_cast<std::size_t>(column);
      put_part(0, 0, row_words, [&](int turn, int step, int row) {
        return of_bits[static_cast<std::size_t>(layout.row_bit(value, turn, step, row)) * dim + i];
      });
      put_part(1, row_words, head_dim / 32, [&](int turn, int step, int row) {
        return static_cast<double>(
            inverse[static_cast<std::size_t>(LinearRowsLayout::row_channel(turn, step, row)) * dim + i]);
      });
    }
  }
  return out;
}

}  // namespace kvq
