#include "write_case.h"

#include <kvq/plan/layer_pages.h>
#include <kvq/runtime/prepare.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <bit>
#include <stdexcept>
#include <variant>

namespace kvq::test {

namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

/// A copy of host values on the device; null if there are none.
template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) {
    if (values.empty()) return;
    check(cudaMalloc(&data_, values.size() * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  T* get() const { return static_cast<T*>(data_); }

 private:
  void* data_ = nullptr;
};

}  // namespace

float from_16_bits(std::uint16_t bits, bool bf16) {
  return bf16 ? __bfloat162float(__ushort_as_bfloat16(bits)) : __half2float(__ushort_as_half(bits));
}
std::uint16_t to_16_bits(float x, bool bf16) {
  return bf16 ? __bfloat16_as_ushort(__float2bfloat16(x)) : __half_as_ushort(__float2half(x));
}

std::vector<const WriteVariant*> plain_write_variants() {
  std::vector<const WriteVariant*> plain;
  for (const WriteVariant* variant : write_variants())
    if (variant->k.index_bytes == 0 && variant->v.index_bytes == 0) plain.push_back(variant);
  return plain;
}

TensorPlan write_plan(const WriteVariant& variant, const WriteCase& c, Side side) {
  const bool value = side == Side::v;
  const TileSide& format = value ? variant.v : variant.k;
  TensorPlan plan;
  plan.center = value ? c.center_v : c.center_k;
  const int order = value ? c.order_v : c.order_k;
  const std::vector<float>& matrix = value ? c.matrix_v : c.matrix_k;
  if (order > 1) plan.rotation = {.kind = RotationKind::block_hadamard, .order = order, .signs = c.signs};
  if (!matrix.empty()) {
    plan.rotation = {.kind = RotationKind::dense, .matrix = matrix};
    plan.rotation.inverse = value ? c.inverse_v : c.inverse_k;
    if (static_cast<int>(matrix.size()) == format.head_dim * format.head_dim) plan.rotation.scope = Scope::layer;
  }
  plan.rotation.channel_scale = value ? c.scale_v : c.scale_k;
  if (format.exact()) return plan;
  UniformCoder coder;
  coder.bits = format.bits, coder.group_size = format.group_size, coder.rule = value ? c.rule_v : c.rule_k;
  coder.levels = format.numbers == 2 ? UniformLevels::affine : UniformLevels::symmetric;
  coder.scale_type = number_type_of(format, value ? variant.v_bfloat : variant.k_bfloat);
  coder.zero = format.integer_zero ? ZeroKind::integer : ZeroKind::floating;
  plan.coder = coder;
  if (coder.rule == ScaleRule::minmax) plan.clip_ratio = value ? c.clip_v : c.clip_k;
  return plan;
}

namespace {

/// The arrays that one WriteSide points to.
struct SideOnDevice {
  SideOnDevice(const WriteVariant& variant, const WriteCase& c, Side side)
      : plan(write_plan(variant, c, side)),
        dim((side == Side::v ? variant.v : variant.k).head_dim),
        order(side == Side::v ? c.order_v : c.order_k),
        rows(side == Side::v ? c.v : c.k),
        center(rotated_center(plan, c.num_kv_heads, dim)),
        signs(plan.rotation.channel_scale.empty() ? plan.rotation.signs : std::vector<std::int8_t>{}),
        before(write_factors(plan.rotation, dim, variant.bf16)),
        factors(before.factors),
        row_scales(of_heads(plan, before.row_scales, c.num_kv_heads, dim, variant.bf16)),
        rotation(packed(plan.rotation, dim, variant.bf16)),
        ranks(clip_ranks(plan, c.num_kv_heads, dim)) {}

  WriteSide side(int num_kv_heads) const {
    WriteSide s;
    s.x = rows.get(), s.token_stride = std::int64_t{num_kv_heads} * dim;
    s.center = center.get();
    s.signs = signs.get(), s.per_head = true, s.order = order;
    s.rule = scale_rule(plan.coder);
    s.clip_ranks = ranks.get();
    s.rotation = rotation.get();
    s.factors = factors.get(), s.row_scales = row_scales.get();
    s.rotation_stride = plan.rotation.scope == Scope::layer ? 0 : packed_rotation_bytes(dim);
    return s;
  }

 private:
  /// Units for fp16 rows and a matrix that is not orthogonal.
  static std::vector<float> row_scales_of(const Rotation& rotation, int dim, bool bf16) {
    return bf16 || rotation.inverse.empty() ? std::vector<float>() : fp16_row_scales(rotation.matrix, dim);
  }
  static std::vector<float> of_heads(const TensorPlan& plan, std::vector<float> row_scales, int heads, int dim,
                                     bool bf16) {
    if (row_scales.empty()) row_scales = row_scales_of(plan.rotation, dim, bf16);
    if (!row_scales.empty() && plan.rotation.scope == Scope::layer)
      row_scales.resize(static_cast<std::size_t>(heads), row_scales[0]);
    return row_scales;
  }
  static std::vector<std::byte> packed(const Rotation& of, int dim, bool bf16) {
    const std::vector<float>& matrices = of.matrix;
    if (matrices.empty()) return {};
    const auto each = static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim);
    std::vector<std::byte> out(matrices.size() / each * static_cast<std::size_t>(packed_rotation_bytes(dim)));
    const Status status = pack_rotations(matrices, dim, bf16, out, row_scales_of(of, dim, bf16));
    if (!status.ok()) throw std::runtime_error(status.message());
    return out;
  }

  TensorPlan plan;
  int dim, order;
  OnDevice<std::uint16_t> rows;
  OnDevice<float> center;
  OnDevice<std::int8_t> signs;
  WriteFactors before;
  OnDevice<std::uint16_t> factors;
  OnDevice<float> row_scales;
  OnDevice<std::byte> rotation;
  OnDevice<std::int32_t> ranks;
};

}  // namespace

std::vector<std::byte> run_write_case(const WriteVariant& variant, const WriteCase& c,
                                      const std::vector<std::byte>& before) {
  const SideOnDevice k(variant, c, Side::k), v(variant, c, Side::v);
  const OnDevice<std::int64_t> slots(c.slot_mapping);
  const OnDevice<std::byte> pages(before);
  WriteParams p;
  p.num_tokens = c.num_tokens, p.num_kv_heads = c.num_kv_heads;
  p.k = k.side(c.num_kv_heads), p.v = v.side(c.num_kv_heads);
  p.slot_mapping = slots.get(), p.pages = pages.get();
  p.page_shift = std::countr_zero(static_cast<unsigned>(c.page_size));
  p.page_stride = static_cast<std::int64_t>(before.size()) / c.num_pages;
  p.extents.num_pages = c.num_pages;
  WriteLaunch launch;
  Status status = check_write(variant, p);
  if (status.ok()) status = variant.plan(launch);
  if (status.ok()) status = variant.run(launch, p, nullptr);
  if (!status.ok()) throw std::runtime_error(status.message());
  check(cudaDeviceSynchronize(), "quantize_write");
  std::vector<std::byte> after(before.size());
  check(cudaMemcpy(after.data(), pages.get(), after.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return after;
}

}  // namespace kvq::test
