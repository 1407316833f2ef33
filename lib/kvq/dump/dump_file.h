#pragma once

#include <kvq/core/dtype.h>
#include <kvq/core/geometry.h>
#include <kvq/core/tensor_view.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvq {

/// One tensor of one layer, [T, H, D] row-major: in the stored type (f16, bf16, f32), or float32 if load_layer() has
/// applied RoPE.
struct ActivationTensor {
  DType dtype = DType::f32;
  std::int64_t tokens = 0;
  int heads = 0;
  int dim = 0;
  std::vector<std::byte> raw;

  TensorView view() const { return {dtype, tokens, heads, dim, raw.data()}; }
  /// TensorView::load_head().
  void load_head(int head, std::int64_t first, std::int64_t count, float* out) const {
    view().load_head(head, first, count, out);
  }
};

/// Tokens [first, first + count) of one file of a dump, known by its content.
struct DumpRange {
  std::string dump;  ///< content hash of the file's tokens of the layer, see Dump::load_layer()
  std::int64_t first = 0, count = 0;
  bool operator==(const DumpRange&) const = default;
};

/// Everything one layer's calibration reads. Sequence s is tokens cu_seqlens[s] .. cu_seqlens[s+1]-1.
struct LayerActivations {
  int layer = 0;
  LayerGeometry geometry;
  std::vector<std::int64_t> cu_seqlens;  ///< [S+1], starts at 0
  std::vector<std::int64_t> positions;   ///< [T]
  std::vector<std::uint8_t> generated;   ///< [T], or empty
  ActivationTensor q, k;                 ///< after RoPE, always
  std::optional<ActivationTensor> v;
  std::vector<float> o_proj;            ///< [hidden, Hq*Dv] or empty
  std::int64_t o_proj_rows = 0;         ///< hidden
  std::vector<float> o_proj_metric;     ///< [Hkv, Dv, Dv] or empty; symmetric
  std::vector<float> output_curvature;  ///< [Hq, Dv, Dv] or empty
  std::string content_hash;             ///< "xxh3-128:...", see load_layer()
  std::vector<DumpRange> ranges;        ///< where the tokens come from, in order
};

/// A dump of one or several files (formats/dump.md). open() checks the structure of all files and the numbers of the
/// small tensors (frequencies, metrics, curvature); load_layer() checks all numbers (finite, not too large, not all
/// zero). Threads may call const functions of one Dump, and functions of several, at the same time. open() tries each
/// file in a child process first, because a damaged file can crash HDF5 (see crash_probe.h).
class Dump {
 public:
  /// All independent faults of the files' structure are reported together, one a line.
  /// @throws Error{io, bad_input, unsupported}
  static Dump open(const std::vector<std::filesystem::path>& files);

  Dump(Dump&&) noexcept;
  Dump& operator=(Dump&&) noexcept;
  ~Dump();

  const ModelGeometry& model() const;  ///< geometry of the layers that are there
  CapturePoint capture_point() const;
  const std::string& producer() const;
  bool marks_generated() const;     ///< whether it has /generated
  std::int64_t num_tokens() const;  ///< T, all files
  std::int64_t num_sequences() const;
  std::int64_t longest_sequence() const;      ///< in tokens
  std::int64_t layer_bytes(int layer) const;  ///< raw bytes of q, k and v as stored

  /// Reads one layer of all files, joined in file order. Of a pre_rope dump it applies RoPE to q and k, which become
  /// float32. content_hash is XXH3-128 over: cu_seqlens and positions (int64 little-endian), then the stored bytes of
  /// q, k, v of each file in order. ranges[i].dump is the same hash of file i alone.
  /// @throws Error{numerical} naming file, layer, tensor and the first bad element for NaN, Inf, too large numbers or
  /// an
  ///         all-zero tensor; Error{bad_input} if a file ends early, or tensors that files share differ
  /// Any thread may call it: threads take turns only in HDF5, which reads chunked tensors.
  LayerActivations load_layer(int layer) const;

  /// Finds what load_layer() would refuse, and keeps nothing: memory does not grow with the layer.
  void check_layer(int layer) const;

 private:
  struct Impl;
  explicit Dump(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Applies RoPE to one head's row in place (formats/dump.md). `row` is [head_dim].
void apply_rope(const RopeStyle& rope, std::int64_t position, float* row);

}  // namespace kvq
