#pragma once

#include <kvq/container/json.h>
#include <kvq/container/safetensors.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace kvq::test {

/// A kvq container (artifact or statistics) in editable parts, from which tests write files as a hostile or a future
/// writer would.
struct EditableFile {
  struct Tensor {
    DType dtype = DType::f32;
    std::vector<std::int64_t> shape;
    std::vector<std::byte> data;
  };
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;
  Json manifest;

  static EditableFile read(const std::filesystem::path& path);
  /// Writes the file, with the manifest in the metadata. @param fit_hash  compute the content hash anew; false keeps
  /// the old one
  void write(const std::filesystem::path& path, bool fit_hash = true) const;
  /// Overwrites one element of an F32 tensor.
  void set_float(const std::string& tensor, std::size_t index, float value);
};

std::string file_bytes(const std::filesystem::path& path);

}  // namespace kvq::test
