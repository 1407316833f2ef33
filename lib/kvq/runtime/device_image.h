#pragma once

#include <kvq/plan/layer_plan.h>
#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/quantize_write/params.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace kvq {

/// What the weights that are served already hold.
struct Folded {
  bool k = false, v = false;  ///< rotations and centres
  bool k_scales = false;      ///< the channel_scale of keys alone
};

/// Pointers of one layer into an image on the device, as kernels' parameters want them.
struct LayerPointers {
  WriteSide write_k, write_v;  ///< without rows
  DeviceRotation rotation_k, rotation_v;
  const float* center_k = nullptr;
  const float* center_v = nullptr;
};

/// The bytes that kernels read of some layers: signs or factors, matrices (for reading A^-T of keys and A^-1 of values,
/// laid out for tensor cores too; for writing A, packed), centres, clips. Made on the host; all offsets are multiples
/// of 256, so one copy to aligned memory brings it to a device.
class DeviceImage {
 public:
  /// @param plan  one rank's (see slice()), valid, with values, of uniform or exact coders
  /// @param bf16  activations, else fp16
  /// @throws      Error{unsupported} for a dense rotation of a head_dim that cannot be packed, and for what
  ///              write_factors() refuses
  void add(const LayerPlan& plan, Folded folded, bool bf16);

  std::span<const std::byte> bytes() const { return bytes_; }
  /// @param i     order of add()
  /// @param base  where the bytes are on the device; not followed
  LayerPointers pointers(std::size_t i, const std::byte* base) const;

 private:
  /// Offsets of one side, and what goes with them.
  struct SideOffsets {
    std::optional<std::size_t> signs = {};
    std::optional<std::size_t> matrix = {}, fragments = {};     ///< for reading, twice
    std::optional<std::size_t> factors = {}, sizes = {};        ///< for reading
    std::optional<std::size_t> packed = {};                     ///< for writing
    std::optional<std::size_t> write_factors = {}, units = {};  ///< for writing
    std::optional<std::size_t> center = {}, write_center = {};  ///< the same
    std::optional<std::size_t> clip_ranks = {};
    std::int64_t packed_stride = 0;
    int order = 0;  ///< of Hadamard blocks; 0 = none
    bool per_head = false;
    ScaleRule rule = ScaleRule::minmax;
  };
  struct Layer {
    SideOffsets k, v;
  };
  SideOffsets add_side(const TensorPlan& plan, const LayerGeometry& geometry, bool folded, Side which, bool bf16);
  template <typename T>
  std::optional<std::size_t> put(const std::vector<T>& values);

  std::vector<std::byte> bytes_;
  std::vector<Layer> layers_;
};

}  // namespace kvq
