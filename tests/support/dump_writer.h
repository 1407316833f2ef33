#pragma once

#include <kvq/core/dtype.h>
#include <kvq/core/geometry.h>

#include <hdf5.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace kvq::test {

/// One layer of a dump in memory. Tensors are row-major floats, narrowed to `dtype` when written.
struct DumpLayer {
  int layer = 0;
  LayerGeometry geometry = {};
  DType dtype = DType::f32;                  ///< f32, f16 or bf16
  std::vector<float> q = {}, k = {};         ///< [T, Hq, D], [T, Hkv, D]
  std::vector<float> v = {};                 ///< [T, Hkv, Dv]; empty = not written
  std::vector<float> o_proj = {};            ///< [hidden, Hq*Dv], written as float16; empty = not written
  std::vector<float> o_proj_metric = {};     ///< [Hkv, Dv, Dv]; empty = not written, and the version is 1.0
  std::vector<float> output_curvature = {};  ///< [Hq, Dv, Dv]; empty = not written
};

/// A dump in memory, with the choices that formats/dump.md leaves to a writer.
struct DumpContent {
  std::string model_name = "test-model";
  std::string model_fingerprint = {};  ///< empty = not written
  std::string model_config = {};       ///< empty = not written
  std::string required = {};           ///< words of `requires`; empty = not written
  std::string producer = "kvq tests";
  CapturePoint capture_point = CapturePoint::post_rope;
  int num_layers = 1;
  std::vector<std::int64_t> cu_seqlens = {};
  std::vector<std::int64_t> positions = {};
  std::vector<std::uint8_t> generated = {};  ///< empty = not written
  std::vector<DumpLayer> layers = {};

  bool fixed_strings = false;         ///< fixed-length instead of variable-length strings
  bool half_as_bits = false;          ///< float16 as uint16 instead of an HDF5 float
  std::int64_t chunk_tokens = 0;      ///< q, k, v in chunks of this many tokens; 0: contiguous
  bool small_integers = false;        ///< attributes as int32 instead of int64
  bool newest_structures = false;     ///< what h5py writes with libver="latest"
  std::int64_t user_block_bytes = 0;  ///< foreign bytes before the HDF5 file: 0, or a power of two from 512
};

/// Parameters of random_dump().
struct RandomDumpSpec {
  std::vector<int> layers = {0};
  int num_layers = 0;  ///< of the model; 0: one more than the last of `layers`
  int num_q_heads = 4, num_kv_heads = 2, head_dim = 8, v_head_dim = 6;
  std::vector<std::int64_t> lengths = {13, 5};  ///< tokens of each sequence
  DType dtype = DType::f32;
  AttentionKind kind = AttentionKind::gqa;
  RopeStyle rope = {.layout = RopeLayout::half, .dim = 8, .inv_freq = {1.0, 0.1, 0.01, 0.001}};
  CapturePoint capture_point = CapturePoint::post_rope;
  int sliding_window = 0;
  std::uint64_t seed = 1;
};

/// Gaussian q, k and v, the same for equal seeds; different for each layer.
DumpContent random_dump(const RandomDumpSpec& spec);

/// Damages the open file after all data is written.
using Damage = std::function<void(hid_t file)>;

/// Writes a dump with the HDF5 C API; throws std::runtime_error if that fails.
void write_dump(const std::filesystem::path& path, const DumpContent& content, const Damage& damage = {});

// Functions for Damage. `object` is a path such as "/layers/0". set_attribute() and the functions below replace what
// exists.
void remove_attribute(hid_t file, const std::string& object, const std::string& name);
void set_attribute(hid_t file, const std::string& object, const std::string& name, const std::string& value);
void set_attribute(hid_t file, const std::string& object, const std::string& name, std::int64_t value);
void set_attribute(hid_t file, const std::string& object, const std::string& name, int value);
void set_attribute(hid_t file, const std::string& object, const std::string& name, double value);
void remove_link(hid_t file, const std::string& path);
void set_dataset(hid_t file, const std::string& path, hid_t type, const std::vector<hsize_t>& shape, const void* data);

/// IEEE binary16, little-endian, as h5py describes it. The caller closes it.
hid_t half_type();

}  // namespace kvq::test
