#pragma once

#include <kvq/core/dtype.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvq {

/// Description of one tensor in a file. Row-major, little-endian.
struct TensorInfo {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< offset into the data part
  std::uint64_t end = 0;
  std::int64_t count() const;  ///< number of elements
};

/// A safetensors file, mapped read-only. Opening checks everything before any size from the file is used: header
/// length, JSON, dtypes, extents (product without overflow), offsets inside the file, no overlap, no hole, no duplicate
/// name, string-only `__metadata__`. Data of a tensor need not be aligned; `read<T>()` copies.
class SafetensorsFile {
 public:
  /// @throws Error{io} if it cannot be opened, Error{bad_input} if malformed, Error{unsupported} for a dtype that this
  ///         reader does not know (the message names the tensor)
  static SafetensorsFile open(const std::filesystem::path& path);
  /// The same checks on bytes in memory (fuzzing, tests). The bytes are copied.
  static SafetensorsFile parse(std::span<const std::byte> bytes, std::string name);

  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();

  const std::string& name() const;  ///< path, for messages
  const std::map<std::string, std::string>& metadata() const;
  const std::map<std::string, TensorInfo>& tensors() const;

  bool has(std::string_view tensor) const;
  /// @throws Error{bad_input} if there is no such tensor
  const TensorInfo& info(std::string_view tensor) const;
  std::span<const std::byte> bytes(std::string_view tensor) const;
  /// Copies the elements. T is float, double, std::int8_t, std::uint8_t, std::uint16_t or std::int64_t.
  /// @param shape  expected shape; -1 matches any extent
  /// @throws       Error{bad_input} if the name is missing or dtype or shape differ (expected and found are named)
  template <typename T>
  std::vector<T> read(std::string_view tensor, const std::vector<std::int64_t>& shape) const;

 private:
  struct Impl;
  explicit SafetensorsFile(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Collects tensors and metadata, then writes them in one go: sorted by name, without gaps, the header padded with
/// spaces so that data starts at a multiple of 8. Equal content gives equal bytes.
class SafetensorsWriter {
 public:
  SafetensorsWriter() = default;
  SafetensorsWriter(SafetensorsWriter&&) = default;  // no copy: its entries would point to the original's memory
  SafetensorsWriter& operator=(SafetensorsWriter&&) = default;
  /// `data` is moved in and must hold product(shape) * size_of(dtype) bytes; names are unique.
  void add(const std::string& name, DType dtype, std::vector<std::int64_t> shape, std::vector<std::byte> data);
  template <typename T>
  void add(std::string name, std::vector<std::int64_t> shape, std::span<const T> values);
  /// Adds a large tensor without copying it: its data is `pieces`, one after another. The caller keeps their memory
  /// alive and unchanged until the last call of this writer.
  void add_view(std::string name, DType dtype, std::vector<std::int64_t> shape,
                std::vector<std::span<const std::byte>> pieces);
  void set_metadata(std::string key, std::string value);

  /// Content hash of formats/artifact.md, "xxh3-128:<32 hex>", over `manifest` and all tensors.
  std::string content_hash(std::string_view manifest) const;

  /// Writes a temporary file in the same folder, flushes it to disk and renames it. On any failure the temporary file
  /// is removed and `path` is unchanged.
  /// @throws Error{io} naming the path and the system's reason
  void write(const std::filesystem::path& path) const;

 private:
  struct Entry {
    DType dtype;
    std::vector<std::int64_t> shape;
    std::vector<std::span<const std::byte>> pieces;
    std::vector<std::byte> data;  ///< the memory of `pieces`; empty if the caller owns it
    std::uint64_t bytes;
  };
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

/// Content hash of an opened file, for comparison with the hash in its metadata.
std::string content_hash(const SafetensorsFile& file, std::string_view manifest);

/// Writes `bytes` atomically, as SafetensorsWriter::write does.
void write_file_atomically(const std::filesystem::path& path, std::span<const std::byte> bytes);

}  // namespace kvq
