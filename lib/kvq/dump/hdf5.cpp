#include <kvq/core/error.h>
#include <kvq/core/text.h>
#include <kvq/dump/hdf5.h>
#include <kvq/dump/hdf5_detail.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <memory>
#include <mutex>
#include <system_error>

namespace kvq::hdf5 {

void reject(const std::string& place, const std::string& what, ErrorKind kind, std::string hint) {
  throw Error{kind, fmt::format("{}: {}", place, what), std::move(hint)};
}

std::string library_reason() {
  std::string reason;
  const auto keep_deepest = [](unsigned depth, const H5E_error2_t* error, void* text) -> herr_t {
    if (depth == 0 && error->desc != nullptr) *static_cast<std::string*>(text) = error->desc;
    return 0;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, keep_deepest, &reason);
  return reason.empty() ? "no reason given" : printable(reason, 200);
}

namespace {

constexpr std::size_t kMaxStringBytes = std::size_t{16} << 20;

/// Frees what HDF5 allocated for a variable-length string.
struct LibraryFree {
  void operator()(char* text) const { H5free_memory(text); }
};

std::string read_variable_string(hid_t attribute, hid_t stored_type, const std::string& place) {
  const TypeHandle type(H5Tcopy(H5T_C_S1));
  H5Tset_size(type, H5T_VARIABLE);
  H5Tset_cset(type, H5Tget_cset(stored_type));  // HDF5 refuses to convert between character sets
  char* raw = nullptr;
  if (H5Aread(attribute, type, static_cast<void*>(&raw)) < 0) reject(place, "cannot be read: " + library_reason());
  const std::unique_ptr<char, LibraryFree> text(raw);
  return text ? text.get() : "";  // an empty string is stored as a null pointer
}

std::string read_fixed_string(hid_t attribute, hid_t stored_type, const std::string& place) {
  const std::size_t size = H5Tget_size(stored_type);
  if (size > kMaxStringBytes)
    reject(place, fmt::format("string of {} bytes, expected at most {}", size, kMaxStringBytes));
  std::string text(size, '\0');
  if (H5Aread(attribute, stored_type, text.data()) < 0) reject(place, "cannot be read: " + library_reason());
  text.resize(std::min(text.find('\0'), text.size()));
  if (H5Tget_strpad(stored_type) == H5T_STR_SPACEPAD) text.resize(text.find_last_not_of(' ') + 1);
  return text;
}

}  // namespace

namespace {

std::mutex& library_mutex() {
  static std::mutex mutex;
  return mutex;
}

/// Scopes that are open. No std::recursive_mutex, whose owner crash_probe.cpp's child process would not be.
thread_local int depth = 0;

}  // namespace

CallScope::CallScope() {
  if (depth++ == 0) library_mutex().lock();
  // At exit HDF5 would try to close objects that a damaged file kept open, and would print errors. Read-only files do
  // not need that. H5dont_atexit() must come before every other HDF5 call.
  [[maybe_unused]] static const herr_t no_cleanup_at_exit = H5dont_atexit();
  H5Eget_auto2(H5E_DEFAULT, &function_, &data_);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}
CallScope::~CallScope() {
  H5Eset_auto2(H5E_DEFAULT, function_, data_);
  if (--depth == 0) library_mutex().unlock();
}

// ---- Object: attributes

void Object::fail(const std::string& what) const { reject(place_, what); }

bool Object::has_attribute(const char* name) const { return H5Aexists(id_, name) > 0; }

AttributeHandle Object::open_scalar(const char* name) const {
  if (!has_attribute(name)) fail(fmt::format("attribute {} is missing", name));
  AttributeHandle attribute(H5Aopen(id_, name, H5P_DEFAULT));
  if (!attribute.is_open()) fail(fmt::format("attribute {} cannot be opened: {}", name, library_reason()));
  const SpaceHandle space(H5Aget_space(attribute));
  if (H5Sget_simple_extent_npoints(space) != 1) fail(fmt::format("attribute {}: expected one value", name));
  return attribute;
}

std::string Object::string_attribute(const char* name) const {
  const AttributeHandle attribute = open_scalar(name);
  const TypeHandle type(H5Aget_type(attribute));
  const std::string place = fmt::format("{}: attribute {}", place_, name);
  if (H5Tget_class(type) != H5T_STRING) reject(place, "expected a string, found " + describe_type(type));
  const std::string text = H5Tis_variable_str(type) > 0 ? read_variable_string(attribute, type, place)
                                                        : read_fixed_string(attribute, type, place);
  if (!is_utf8(text)) reject(place, fmt::format("expected UTF-8, found '{}'", printable(text, 40)));
  return text;
}

std::int64_t Object::integer_attribute(const char* name) const {
  const AttributeHandle attribute = open_scalar(name);
  const TypeHandle type(H5Aget_type(attribute));
  if (!is_integer_le(type)) fail(fmt::format("attribute {}: expected an integer, found {}", name, describe_type(type)));
  std::int64_t value = 0;  // uint64 beyond int64 is clipped, and every caller checks a range
  if (H5Aread(attribute, H5T_NATIVE_INT64, &value) < 0)
    fail(fmt::format("attribute {} cannot be read: {}", name, library_reason()));
  return value;
}

double Object::float_attribute(const char* name) const {
  const AttributeHandle attribute = open_scalar(name);
  const TypeHandle type(H5Aget_type(attribute));
  if (!is_float_le(type) && !is_integer_le(type))
    fail(fmt::format("attribute {}: expected a float, found {}", name, describe_type(type)));
  double value = 0.0;
  if (H5Aread(attribute, H5T_NATIVE_DOUBLE, &value) < 0)
    fail(fmt::format("attribute {} cannot be read: {}", name, library_reason()));
  return value;
}

// ---- Group

Group::Group(GroupHandle handle, std::string place, std::string file_name, int descriptor)
    : Object(handle, std::move(place)),
      handle_(std::move(handle)),
      file_name_(std::move(file_name)),
      descriptor_(descriptor) {}

bool Group::has(const char* name) const { return H5Lexists(handle_, name, H5P_DEFAULT) > 0; }

void Group::require_hard_link(const char* name, const std::string& child_place) const {
  H5L_info_t info;
  if (!has(name)) reject(child_place, "is missing");
  if (H5Lget_info(handle_, name, &info, H5P_DEFAULT) < 0) reject(child_place, "cannot be opened: " + library_reason());
  if (info.type != H5L_TYPE_HARD) reject(child_place, "is a soft or external link, expected the object itself");
}

Group Group::group(const char* name, std::string_view label) const {
  std::string child_place =
      label.empty() ? fmt::format("{}: {}", place(), name) : fmt::format("{}: {}", file_name_, label);
  require_hard_link(name, child_place);
  GroupHandle child(H5Gopen2(handle_, name, H5P_DEFAULT));
  if (!child.is_open()) reject(child_place, "cannot be opened as a group: " + library_reason());
  return {std::move(child), std::move(child_place), file_name_, descriptor_};
}

Dataset Group::dataset(const char* name) const {
  std::string child_place = fmt::format("{}: {}", place(), name);
  require_hard_link(name, child_place);
  // HDF5 reads a chunk larger than the cache row by row: with unusual chunk shapes, a few bytes per system call.
  constexpr std::size_t kCacheSlots = 101, kCacheBytes = std::size_t{4} << 20;
  const PropertyHandle access(H5Pcreate(H5P_DATASET_ACCESS));
  H5Pset_chunk_cache(access, kCacheSlots, kCacheBytes, 1.0);
  DatasetHandle child(H5Dopen2(handle_, name, access));
  if (!child.is_open()) reject(child_place, "cannot be opened as a dataset: " + library_reason());
  return {std::move(child), std::move(child_place), descriptor_};
}

std::vector<std::string> Group::link_names() const {
  std::vector<std::string> names;
  const auto remember = [](hid_t, const char* name, const H5L_info_t*, void* list) noexcept -> herr_t {
    static_cast<std::vector<std::string>*>(list)->emplace_back(name);
    return 0;
  };
  if (H5Literate(handle_, H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, remember, &names) < 0)
    fail("its links cannot be listed: " + library_reason());
  return names;
}

// ---- File

File File::open(const std::filesystem::path& path) {
  const std::string name = safe_line(path.string());
  // These checks come first, because HDF5 does not distinguish a missing file from a damaged one.
  std::error_code error;
  const bool is_file = std::filesystem::is_regular_file(path, error);
  if (!error && is_file && !std::ifstream(path)) error = {errno, std::generic_category()};
  if (error) reject(name, "cannot open: " + error.message(), ErrorKind::io);
  if (!is_file) reject(name, "cannot open: not a regular file", ErrorKind::io);
  if (H5Fis_hdf5(path.c_str()) <= 0) reject(name, "not an HDF5 file");
  const PropertyHandle access(H5Pcreate(H5P_FILE_ACCESS));
  H5Pset_fapl_sec2(access);  // plain system calls on one descriptor, which Dataset::read() shares
  FileHandle handle(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access));
  if (!handle.is_open()) reject(name, "damaged HDF5 file: " + library_reason());
  return {std::move(handle), name};
}

File::File(FileHandle handle, std::string name) : handle_(std::move(handle)), name_(std::move(name)) {
  void* descriptor = nullptr;
  if (H5Fget_vfd_handle(handle_, H5P_DEFAULT, &descriptor) < 0 || descriptor == nullptr)
    reject(name_, "cannot be read: " + library_reason(), ErrorKind::io);
  descriptor_ = *static_cast<int*>(descriptor);
}

Group File::root() const {
  GroupHandle root(H5Gopen2(handle_, "/", H5P_DEFAULT));
  if (!root.is_open()) reject(name_, "damaged HDF5 file: " + library_reason());
  return {std::move(root), name_, name_, descriptor_};
}

}  // namespace kvq::hdf5
