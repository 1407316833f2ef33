#pragma once

#include <kvq/plan/layer_plan.h>
#include <kvq/runtime/kernels/common/dequantize_variant.h>
#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/quantize_write/params.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace kvq {

/// What is folded into the weights that are served.
struct Folded {
  bool k = false, v = false;  ///< rotations and centers
  bool k_scales = false;      ///< only the channel_scale of keys
};

/// Pointers of one layer into an image on the device, as kernel parameters.
struct LayerPointers {
  WriteSide write_k, write_v;  ///< `x` and token_stride are not set
  DeviceRotation rotation_k, rotation_v;
  const float* center_k = nullptr;
  const float* center_v = nullptr;
  RowCode code_k = {}, code_v = {};  ///< for reading; write_k and write_v have them, too
};

/// Which tuned kernels for bit tiles a layer has: decode and dequantization read Theta of linear rows, in layouts of
/// their own.
struct BitKernels {
  bool decode = false, dequantize = false;
  DecodedSides decoded = {};  ///< of dequantization: needs only the inverse of the rotation
};

/// The constant data that kernels read for some layers: signs or factors, matrices (for reading the cache A^-T of keys
/// and A^-1 of values, also laid out for tensor cores; for writing A, packed), centers, clip ranks, and what RowCode
/// points to. Made on the host; all offsets are multiples of 256, so one copy to aligned memory uploads it.
class DeviceImage {
 public:
  /// @param plan  plan of one rank (see slice()), valid, with values; nothing is folded of a side with centroids
  /// @param bf16  activations are bfloat16, else fp16
  /// @param pages   of the layer
  /// @param kernels  with decode there are DeviceRotation::taps, with dequantize DeviceRotation::row_matrices
  /// @throws      Error{unsupported} for a dense rotation of a head_dim that cannot be packed, and for what
  ///              write_factors() refuses
  void add(const LayerPlan& plan, Folded folded, bool bf16, const PageLayout& pages = {}, BitKernels kernels = {});

  std::span<const std::byte> bytes() const { return bytes_; }
  /// @param i     index of the layer, in the order of add()
  /// @param base  address of the bytes on the device; not dereferenced
  LayerPointers pointers(std::size_t i, const std::byte* base) const;

 private:
  /// Offsets of one side, and the parameters that are no arrays.
  struct SideOffsets {
    std::optional<std::size_t> signs = {};
    std::optional<std::size_t> matrix = {}, fragments = {};                            ///< for reading, in two layouts
    std::optional<std::size_t> row_matrices = {}, tap_weights = {}, tap_sources = {};  ///< for reading
    int num_taps = 0;
    std::optional<std::size_t> factors = {}, sizes = {};             ///< for reading
    std::optional<std::size_t> packed = {};                          ///< for writing
    std::optional<std::size_t> write_factors = {}, row_scales = {};  ///< for writing
    std::optional<std::size_t> center = {}, write_center = {};       ///< for reading; rotated, for writing
    std::optional<std::size_t> clip_ranks = {};
    std::int64_t packed_stride = 0;
    int order = 0;  ///< of Hadamard blocks; 0 = none
    bool per_head = false;
    ScaleRule rule = ScaleRule::minmax;
    std::optional<std::size_t> code_heads = {}, code_tables = {}, code_weights = {}, code_levels = {}, centroids = {},
                               programs = {}, program_weights = {}, program_sources = {}, rotated_centroids = {};
    RowCode code = {};  ///< without pointers
  };
  struct Layer {
    SideOffsets k, v;
  };
  SideOffsets add_side(const TensorPlan& plan, const LayerGeometry& geometry, bool folded, Side which, bool bf16);
  void add_code(SideOffsets& side, const TensorPlan& plan, int num_kv_heads, int dim);
  /// Adds what tuned kernels for bit tiles multiply by.
  void add_bits(SideOffsets& side, const TensorPlan& plan, const LayerGeometry& geometry, bool folded, Side which,
                const TileSide& tiles, BitKernels kernels);
  template <typename T>
  std::optional<std::size_t> put(const std::vector<T>& values);

  std::vector<std::byte> bytes_;
  std::vector<Layer> layers_;
};

}  // namespace kvq
