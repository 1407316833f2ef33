#pragma once

#include <kvq/container/json.h>
#include <kvq/container/safetensors.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace kvq::test {

/// A kvq container (artifact or statistics) taken apart, to be changed and written again: what a hostile or a future
/// writer would make of it.
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
  /// The manifest goes into the metadata; the content hash is made to fit, unless it shall stay what it was.
  void write(const std::filesystem::path& path, bool fit_hash = true) const;
  /// Overwrites one element of an F32 tensor.
  void set_float(const std::string& tensor, std::size_t index, float value);
};

std::string file_bytes(const std::filesystem::path& path);

}  // namespace kvq::test
