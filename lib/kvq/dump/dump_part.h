#pragma once

#include <kvq/core/dtype.h>
#include <kvq/core/geometry.h>
#include <kvq/dump/faults.h>
#include <kvq/dump/hdf5.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace kvq {

/// The sequences of a file: sequence s is tokens cu_seqlens[s] .. cu_seqlens[s+1]-1.
struct Sequences {
  std::vector<std::int64_t> cu_seqlens;  ///< [S+1]
  std::vector<std::int64_t> positions;   ///< [T]
  std::vector<std::uint8_t> generated;   ///< [T], or empty
  bool operator==(const Sequences&) const = default;
  std::int64_t tokens() const { return static_cast<std::int64_t>(positions.size()); }
  void append(const Sequences& other);
};

/// A tensor of one layer in one file, ready to be read.
struct StoredTensor {
  hdf5::Dataset dataset = {};
  DType dtype = DType::f32;
};

/// One layer of one file.
struct LayerPart {
  LayerGeometry geometry = {};
  StoredTensor q = {}, k = {};
  std::optional<StoredTensor> v = {}, o_proj = {}, o_proj_metric = {}, output_curvature = {};
};

/// One open file of a dump, with checked structure.
struct DumpPart {
  hdf5::File file;
  std::string model_name = {}, model_fingerprint = {}, model_config = {}, producer = {};
  CapturePoint capture_point = CapturePoint::post_rope;
  int num_layers = 0;
  std::set<std::string> features = {};  ///< words of `requires`
  Sequences sequences = {};
  std::map<int, LayerPart> layers = {};

  const std::string& name() const { return file.name(); }
};

/// Opens a file and checks its structure against formats/dump.md. Faults are added to `faults`; after a fault the
/// result is incomplete and only serves to find further faults.
std::optional<DumpPart> read_dump_part(const std::filesystem::path& path, Faults& faults);

}  // namespace kvq
