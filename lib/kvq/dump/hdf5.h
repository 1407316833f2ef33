#pragma once

#define H5_USE_110_API  // in later HDF5 versions too, H5Lget_info and H5Literate are those of 1.10
#include <hdf5.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// Small owning types over the HDF5 C API, for reading untrusted files. Every failure becomes a kvq::Error that names
/// the file and the object. The types accept only what a dump needs: hard links, plain little-endian types, and
/// contiguous or chunked storage without filters whose bytes are all in the file.
namespace kvq::hdf5 {

/// Owns one HDF5 identifier.
template <herr_t (*kClose)(hid_t)>
class Handle {
 public:
  Handle() = default;
  explicit Handle(hid_t id) : id_(id) {}
  Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, -1)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(id_, other.id_);
    return *this;
  }
  ~Handle() {
    if (id_ >= 0) kClose(id_);
  }
  bool is_open() const { return id_ >= 0; }
  operator hid_t() const { return id_; }

 private:
  hid_t id_ = -1;
};

using FileHandle = Handle<H5Fclose>;
using GroupHandle = Handle<H5Gclose>;
using DatasetHandle = Handle<H5Dclose>;
using AttributeHandle = Handle<H5Aclose>;
using TypeHandle = Handle<H5Tclose>;
using SpaceHandle = Handle<H5Sclose>;
using PropertyHandle = Handle<H5Pclose>;

/// Around calls of HDF5: keeps other threads out, because a library without H5_HAVE_THREADSAFE, as Debian's, serves one
/// thread at a time, and stops HDF5 from printing its error stack. Every public function that calls HDF5 makes a
/// CallScope; scopes of one thread may nest.
class CallScope {
 public:
  CallScope();
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

 private:
  H5E_auto2_t function_ = nullptr;
  void* data_ = nullptr;
};

/// Element types that a dump may hold; all little-endian.
enum class Element { u8, u16, i64, f16, f32, f64, other };

/// "uint16", "float32", "big-endian float32", "string": a type in words, for messages.
std::string describe_type(hid_t type);

/// Common base of groups and datasets: a name for messages ("a.h5: layer 3: q") and attributes.
class Object {
 public:
  const std::string& place() const { return place_; }
  bool has_attribute(const char* name) const;
  /// Fixed- or variable-length, valid UTF-8.
  std::string string_attribute(const char* name) const;
  std::int64_t integer_attribute(const char* name) const;
  double float_attribute(const char* name) const;

 protected:
  Object() = default;
  Object(hid_t id, std::string place) : id_(id), place_(std::move(place)) {}
  [[noreturn]] void fail(const std::string& what) const;

 private:
  AttributeHandle open_scalar(const char* name) const;
  hid_t id_ = -1;  // owned by the derived class
  std::string place_;
};

class Dataset : public Object {
 public:
  Dataset() = default;
  /// @param descriptor  of the open file
  Dataset(DatasetHandle handle, std::string place, int descriptor);

  Element element() const { return element_; }
  std::string type_text() const { return describe_type(type_); }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  /// Size of all elements. The constructor has checked that the product does not overflow, that the file holds all
  /// bytes of the dataset, and that at least a quarter of them is on disk, not holes of a sparse file.
  std::uint64_t bytes() const { return bytes_; }
  bool is_chunked() const { return layout_ == H5D_CHUNKED; }
  /// Reads all elements as stored; `target` has exactly bytes() bytes. Contiguous data is read without HDF5. Any
  /// thread may call it.
  void read(std::span<std::byte> target) const;
  /// Reads bytes [begin, begin + target.size()) of contiguous data.
  void read_part(std::uint64_t begin, std::span<std::byte> target) const;

 private:
  void check_storage();

  DatasetHandle handle_;
  TypeHandle type_;
  int descriptor_ = -1;
  H5D_layout_t layout_ = H5D_CONTIGUOUS;
  std::uint64_t offset_ = 0;  ///< in the file, of contiguous data
  Element element_ = Element::other;
  std::vector<std::int64_t> shape_;
  std::uint64_t bytes_ = 0;
};

class Group : public Object {
 public:
  Group(GroupHandle handle, std::string place, std::string file_name, int descriptor);

  bool has(const char* name) const;
  /// `label` names the child in messages instead of its path in the file.
  Group group(const char* name, std::string_view label = {}) const;
  Dataset dataset(const char* name) const;
  std::vector<std::string> link_names() const;

 private:
  /// Refuses every link but a hard one, because another kind can lead to another file.
  void require_hard_link(const char* name, const std::string& child_place) const;

  GroupHandle handle_;
  std::string file_name_;
  int descriptor_;
};

class File {
 public:
  /// @throws Error{io} if it cannot be opened, Error{bad_input} if it is not a whole HDF5 file
  static File open(const std::filesystem::path& path);
  Group root() const;
  const std::string& name() const { return name_; }

 private:
  File(FileHandle handle, std::string name);
  FileHandle handle_;
  std::string name_;
  int descriptor_ = -1;  ///< HDF5 closes it
};

}  // namespace kvq::hdf5
