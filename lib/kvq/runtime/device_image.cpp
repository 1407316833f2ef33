#include <kvq/codec/linear_basis.h>
#include <kvq/codec/rotation_matrix.h>
#include <kvq/core/error.h>
#include <kvq/runtime/checks.h>
#include <kvq/runtime/device_image.h>
#include <kvq/runtime/prepare.h>
#include <kvq/runtime/row_code_data.h>

#include <algorithm>
#include <cstring>

namespace kvq {

namespace {

constexpr std::size_t kTensorAlignment = 256;

/// Each [D, D] of [H, D, D] transposed.
std::vector<float> transposed(const std::vector<float>& matrices, std::size_t dim) {
  std::vector<float> turned(matrices.size());
  for (std::size_t first = 0; first < matrices.size(); first += dim * dim)
    for (std::size_t i = 0; i < dim; ++i)
      for (std::size_t j = 0; j < dim; ++j) turned[first + j * dim + i] = matrices[first + i * dim + j];
  return turned;
}

/// Centers of all KV heads [Hkv, D], repeated if the layer's heads share one; empty if there is none.
std::vector<float> centers(const TensorPlan& plan, int num_kv_heads, std::size_t dim) {
  std::vector<float> all;
  if (plan.center.empty()) return all;
  for (int head = 0; head < num_kv_heads; ++head) {
    const auto from = plan.center.begin() +
                      static_cast<std::ptrdiff_t>(static_cast<std::size_t>(plan.rotation.head_index(head)) * dim);
    all.insert(all.end(), from, from + static_cast<std::ptrdiff_t>(dim));
  }
  return all;
}

/// A^-1 of a dense rotation, [H, D, D].
std::vector<float> inverse_of(const Rotation& rotation, std::size_t dim) {
  return rotation.inverse.empty() ? transposed(rotation.matrix, dim) : rotation.inverse;
}

/// The plan for keys that are multiplied by channel_scale already: without scales, the center multiplied by them.
TensorPlan without_scales(TensorPlan plan) {
  for (std::size_t i = 0; i < plan.center.size(); ++i) plan.center[i] *= plan.rotation.channel_scale[i];
  plan.rotation.channel_scale.clear();
  plan.transform.reset();
  return plan;
}

/// The values of `entries` [H] for all KV heads, [Hkv].
std::vector<float> of_heads(const std::vector<float>& entries, const Rotation& rotation, int num_kv_heads) {
  std::vector<float> all;
  all.reserve(static_cast<std::size_t>(num_kv_heads));
  for (int head = 0; head < num_kv_heads; ++head)
    all.push_back(entries[static_cast<std::size_t>(rotation.head_index(head))]);
  return all;
}

/// Dense matrices in the layout of the write kernels (pack_rotations()).
std::vector<std::byte> packed(const std::vector<float>& matrices, int dim, bool bf16,
                              const std::vector<float>& row_scales) {
  const std::size_t count = matrices.size() / (static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim));
  std::vector<std::byte> bytes(count * static_cast<std::size_t>(packed_rotation_bytes(dim)));
  if (const Status status = pack_rotations(matrices, dim, bf16, bytes, row_scales); !status.ok())
    throw Error{ErrorKind::unsupported, status.message()};
  return bytes;
}

}  // namespace

template <typename T>
std::optional<std::size_t> DeviceImage::put(const std::vector<T>& values) {
  if (values.empty()) return std::nullopt;
  const std::size_t offset = bytes_.size(), size = values.size() * sizeof(T);
  bytes_.resize((offset + size + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment);
  std::memcpy(bytes_.data() + offset, values.data(), size);
  return offset;
}

void DeviceImage::add_code(SideOffsets& side, const TensorPlan& plan, int num_kv_heads, int dim) {
  const RowCodeData data = row_code_data(plan, num_kv_heads, dim);
  side.code = data.values;
  side.code_heads = put(data.heads), side.code_tables = put(data.tables);
  side.code_weights = put(data.weights), side.code_levels = put(data.levels);
  side.programs = put(data.segments.programs), side.program_weights = put(data.segments.weights);
  side.program_sources = put(data.segments.sources);
  side.centroids = put(data.centroids), side.rotated_centroids = put(data.rotated_centroids);
}

DeviceImage::SideOffsets DeviceImage::add_side(const TensorPlan& plan, const LayerGeometry& geometry, bool folded,
                                               Side which, bool bf16) {
  const int num_kv_heads = geometry.num_kv_heads, dim = geometry.dim(which);
  const auto d = static_cast<std::size_t>(dim);
  SideOffsets side{.per_head = plan.rotation.scope == Scope::kv_head, .rule = scale_rule(plan.coder)};
  side.clip_ranks = put(clip_ranks(plan, num_kv_heads, dim));
  add_code(side, plan, num_kv_heads, dim);
  const std::vector<float> center_rotated = rotated_center(plan, num_kv_heads, dim);
  if (folded) {
    // The weights rotate queries, so LSE and sink logits need the rotated center of keys. That of values is in o_proj.
    if (which == Side::k) side.center = put(center_rotated);
    return side;
  }
  side.center = put(centers(plan, num_kv_heads, d));
  side.write_center = put(center_rotated);
  if (plan.rotation.kind == RotationKind::dense) {
    const std::vector<float> inverse = inverse_of(plan.rotation, d),
                             matrix = which == Side::v ? inverse : transposed(inverse, d);
    side.matrix = put(matrix), side.fragments = put(rotation_fragments(matrix, dim));
    std::vector<float> row_scales;
    if (!plan.rotation.is_orthogonal()) {
      side.sizes = put(column_sizes(inverse, dim));
      if (!bf16) row_scales = fp16_row_scales(plan.rotation.matrix, dim);
    }
    side.packed = put(packed(plan.rotation.matrix, dim, bf16, row_scales));
    if (!row_scales.empty()) side.row_scales = put(of_heads(row_scales, plan.rotation, num_kv_heads));
    if (side.per_head) side.packed_stride = packed_rotation_bytes(dim);
  }
  if (plan.rotation.kind == RotationKind::block_hadamard) side.order = plan.rotation.order;
  if (!plan.rotation.channel_scale.empty()) {
    side.order = std::max(1, side.order);  // kind identity: blocks of one channel
    const WriteFactors write = write_factors(plan.rotation, dim, bf16);
    side.write_factors = put(write.factors),
    side.row_scales = put(of_heads(write.row_scales, plan.rotation, num_kv_heads));
    side.factors = put(read_factors(plan.rotation));
  } else if (plan.rotation.kind == RotationKind::block_hadamard) {
    side.signs = put(plan.rotation.signs);
  }
  return side;
}

void DeviceImage::add_bits(SideOffsets& side, const TensorPlan& plan, const LayerGeometry& geometry, bool folded,
                           Side which, const TileSide& tiles, BitKernels kernels) {
  const bool decoded = which == Side::v ? kernels.decoded.v : kernels.decoded.k,
             takes_bits = is_linear_format(tiles) && (kernels.decode || (kernels.dequantize && !decoded));
  if (!takes_bits && !(kernels.dequantize && decoded)) return;
  const int dim = geometry.dim(which), entries = side.per_head ? geometry.num_kv_heads : 1,
            row_bits = 32 * tiles.row_words;
  std::vector<float> bases, matrices;
  for (int head = 0; head < entries; ++head) {
    if (takes_bits) {
      const std::vector<double> basis = linear_basis(plan, head, dim, which, row_bits);
      bases.insert(bases.end(), basis.begin(), basis.end());
    }
    // Hadamard blocks, too, are a matrix here; maps that are folded are none.
    const std::vector<double> inverse = folded ? std::vector<double>() : inverse_matrix(plan.rotation, head, dim);
    matrices.insert(matrices.end(), inverse.begin(), inverse.end());
  }
  if (kernels.dequantize)
    side.row_matrices =
        put(row_matrices(static_cast<std::size_t>(entries), matrices, decoded ? std::vector<float>() : bases, dim,
                         decoded ? 0 : tiles.row_words, which == Side::v));
  if (!takes_bits || !kernels.decode) return;
  const HostTaps taps = linear_taps(bases, dim, row_bits, which == Side::v);
  side.tap_weights = put(taps.weights), side.tap_sources = put(taps.sources), side.num_taps = taps.count;
}

void DeviceImage::add(const LayerPlan& plan, Folded folded, bool bf16, const PageLayout& pages, BitKernels kernels) {
  const LayerGeometry& g = plan.geometry;
  const TensorPlan k = folded.k_scales ? without_scales(plan.k) : plan.k;
  Layer layer;
  layer.k = add_side(k, g, folded.k, Side::k, bf16);
  layer.v = add_side(*plan.v, g, folded.v, Side::v, bf16);
  add_bits(layer.k, k, g, folded.k, Side::k, pages.k, kernels);
  add_bits(layer.v, *plan.v, g, folded.v, Side::v, pages.v, kernels);
  layers_.push_back(layer);
}

LayerPointers DeviceImage::pointers(std::size_t i, const std::byte* base) const {
  const auto at = [&](std::optional<std::size_t> offset) { return offset ? base + *offset : nullptr; };
  const auto floats = [&](std::optional<std::size_t> offset) { return reinterpret_cast<const float*>(at(offset)); };
  const auto signs = [&](const SideOffsets& s) { return reinterpret_cast<const std::int8_t*>(at(s.signs)); };
  const auto code = [&](const SideOffsets& s) {
    RowCode all = s.code;
    all.heads = reinterpret_cast<const HeadRows*>(at(s.code_heads)), all.tables = floats(s.code_tables);
    all.weights = floats(s.code_weights);
    all.levels = reinterpret_cast<const LevelTable*>(at(s.code_levels));
    all.programs = reinterpret_cast<const SegmentProgram*>(at(s.programs));
    if (all.programs)
      all.program_taps = {floats(s.program_weights), reinterpret_cast<const std::uint16_t*>(at(s.program_sources)), 1};
    all.centroids = floats(s.centroids), all.rotated_centroids = floats(s.rotated_centroids);
    return all;
  };
  const auto write = [&](const SideOffsets& s) {
    WriteSide side;
    side.center = floats(s.write_center);
    side.signs = signs(s), side.per_head = s.per_head;
    side.order = std::max(1, s.order);
    side.rule = s.rule;
    side.clip_ranks = reinterpret_cast<const std::int32_t*>(at(s.clip_ranks));
    side.rotation = at(s.packed), side.rotation_stride = s.packed_stride;
    side.factors = reinterpret_cast<const std::uint16_t*>(at(s.write_factors)), side.row_scales = floats(s.row_scales);
    side.code = code(s);
    return side;
  };
  const auto rotation = [&](const SideOffsets& s) {
    return DeviceRotation{
        .order = s.order,
        .per_head = s.per_head,
        .signs = signs(s),
        .matrix = floats(s.matrix),
        .fragments = at(s.fragments),
        .factors = floats(s.factors),
        .sizes = floats(s.sizes),
        .taps = {floats(s.tap_weights), reinterpret_cast<const std::uint16_t*>(at(s.tap_sources)), s.num_taps},
        .row_matrices = at(s.row_matrices),
    };
  };
  const Layer& layer = layers_[i];
  return {
      .write_k = write(layer.k),
      .write_v = write(layer.v),
      .rotation_k = rotation(layer.k),
      .rotation_v = rotation(layer.v),
      .center_k = floats(layer.k.center),
      .center_v = floats(layer.v.center),
      .code_k = code(layer.k),
      .code_v = code(layer.v),
  };
}

}  // namespace kvq
