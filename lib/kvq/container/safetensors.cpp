#include <kvq/container/json.h>
#include <kvq/container/safetensors.h>
#include <kvq/container/safetensors_format.h>
#include <kvq/core/error.h>
#include <kvq/core/text.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <optional>
#include <system_error>
#include <tuple>
#include <utility>

static_assert(std::endian::native == std::endian::little, "safetensors data is copied as it is");

namespace kvq {
namespace {

using Bytes = std::span<const std::byte>;

/// A read-only mapping of a whole file. If another process shortens the file, reading raises SIGBUS, as with any
/// mapping.
class Mapping {
 public:
  Mapping() = default;
  Mapping(void* address, std::size_t size) : address_(address), size_(size) {}
  Mapping(Mapping&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Mapping() {
    if (address_ != nullptr) ::munmap(address_, size_);
  }
  Bytes bytes() const { return {static_cast<const std::byte*>(address_), size_}; }

 private:
  void* address_ = nullptr;
  std::size_t size_ = 0;
};

struct Descriptor {
  int value = -1;
  ~Descriptor() {
    if (value >= 0) ::close(value);
  }
};

[[noreturn]] void fail_io(const std::string& name, const char* action) {
  const int error = errno;
  throw Error{ErrorKind::io, fmt::format("{}: cannot {}: {}", name, action, std::generic_category().message(error))};
}

Mapping map_file(const std::filesystem::path& path) {
  const std::string name = safe_line(path.string());
  // Without O_NONBLOCK the opening of a named pipe would wait for its writer.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.value < 0) fail_io(name, "open");
  struct stat status;
  if (::fstat(file.value, &status) != 0) fail_io(name, "read its size");
  if (!S_ISREG(status.st_mode)) throw Error{ErrorKind::io, fmt::format("{}: cannot open: not a regular file", name)};
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) return {};  // mmap refuses an empty file; the parser reports the missing header
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.value, 0);
  if (address == MAP_FAILED) fail_io(name, "map");
  return {address, size};
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t extent : shape)
    text += (text.empty() ? "" : ", ") + (extent < 0 ? "any" : std::to_string(extent));
  return "[" + text + "]";
}

/// The checked contents of the header. `data` is the part of the file behind the header.
struct Header {
  std::map<std::string, std::string> metadata;
  std::map<std::string, TensorInfo> tensors;
  Bytes data;
};

class HeaderParser {
 public:
  HeaderParser(Bytes file, const std::string& name) : file_(file), name_(name) {}

  Header parse() {
    const std::string_view text = header_text();
    // Root, tensor, shape: nothing in a header is nested deeper.
    const Json json = parse_json(text, name_ + ": header",
                                 {.max_bytes = detail::kMaxHeaderBytes, .max_depth = 3, .max_values = 4u << 20});
    if (!json.is_object()) reject("the header is not a JSON object");
    header_.data = file_.subspan(detail::kLengthBytes + text.size());
    for (const auto& [key, value] : json.items()) {
      if (key == detail::kMetadataKey) {
        read_metadata(value);
      } else {
        header_.tensors.emplace(key, tensor_info(key, value));
      }
    }
    check_coverage();
    return std::move(header_);
  }

 private:
  [[noreturn]] void reject(const std::string& what) const {
    throw Error{ErrorKind::bad_input, fmt::format("{}: {}", name_, what)};
  }
  [[noreturn]] void reject_tensor(const std::string& tensor, const std::string& what) const {
    reject(fmt::format("tensor '{}': {}", printable(tensor), what));
  }

  std::string_view header_text() const {
    if (file_.size() < detail::kLengthBytes)
      reject(fmt::format("not a safetensors file: expected at least 8 bytes, found {}", file_.size()));
    std::uint64_t length;
    std::memcpy(&length, file_.data(), sizeof length);
    // Bytes that no header follows are the text of another kind of file, not a length.
    const bool has_header = file_.size() > detail::kLengthBytes && file_[detail::kLengthBytes] == std::byte{'{'};
    if (length > detail::kMaxHeaderBytes && !has_header) reject("not a safetensors file");
    if (length > detail::kMaxHeaderBytes)
      reject(fmt::format("header of {} bytes, expected at most {}", length, detail::kMaxHeaderBytes));
    const std::uint64_t rest = file_.size() - detail::kLengthBytes;
    if (length > rest) reject(fmt::format("header of {} bytes, but only {} bytes follow", length, rest));
    const std::string_view text(reinterpret_cast<const char*>(file_.data()) + detail::kLengthBytes, length);
    if (!text.starts_with('{')) reject("the header does not begin with '{'");
    return text;
  }

  void read_metadata(const Json& value) {
    if (!value.is_object()) reject("__metadata__ is not a JSON object");
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string())
        reject(fmt::format("__metadata__: '{}': expected a string, found {}", printable(key), text.type_name()));
      header_.metadata.emplace(key, text.get<std::string>());
    }
  }

  const Json& field(const std::string& tensor, const Json& value, const char* key) const {
    const auto found = value.find(key);
    if (found == value.end()) reject_tensor(tensor, fmt::format("{} is missing", key));
    return *found;
  }

  TensorInfo tensor_info(const std::string& tensor, const Json& value) const {
    if (!value.is_object()) reject_tensor(tensor, fmt::format("expected an object, found {}", value.type_name()));
    constexpr std::size_t kFields = 3;
    if (value.size() > kFields) reject_tensor(tensor, "expected dtype, shape and data_offsets alone");
    TensorInfo info;
    info.dtype = dtype(tensor, field(tensor, value, "dtype"));
    info.shape = shape(tensor, field(tensor, value, "shape"));
    std::tie(info.begin, info.end) = offsets(tensor, field(tensor, value, "data_offsets"));
    const auto expected = detail::tensor_bytes(info.dtype, info.shape);
    if (!expected) reject_tensor(tensor, fmt::format("the shape {} overflows", shape_text(info.shape)));
    if (std::cmp_not_equal(info.end - info.begin, *expected))
      reject_tensor(tensor,
                    fmt::format("{} {} takes {} bytes, but data_offsets span {}", detail::safetensors_name(info.dtype),
                                shape_text(info.shape), *expected, info.end - info.begin));
    return info;
  }

  DType dtype(const std::string& tensor, const Json& value) const {
    if (!value.is_string()) reject_tensor(tensor, fmt::format("dtype: expected a string, found {}", value.type_name()));
    const auto& word = value.get_ref<const std::string&>();
    const auto type = detail::safetensors_dtype(word);
    if (!type)
      throw Error{ErrorKind::unsupported,
                  fmt::format("{}: tensor '{}': dtype '{}' is not supported, expected one of {}", name_,
                              printable(tensor), printable(word), detail::kKnownDtypes)};
    return *type;
  }

  std::vector<std::int64_t> shape(const std::string& tensor, const Json& value) const {
    if (!value.is_array()) reject_tensor(tensor, fmt::format("shape: expected an array, found {}", value.type_name()));
    constexpr std::size_t kMaxRank = 64;
    if (value.size() > kMaxRank)
      reject_tensor(tensor, fmt::format("shape: {} extents, expected at most {}", value.size(), kMaxRank));
    std::vector<std::int64_t> extents;
    for (const Json& extent : value) {
      if (!extent.is_number_unsigned() || !std::in_range<std::int64_t>(extent.get<std::uint64_t>()))
        reject_tensor(tensor,
                      fmt::format("shape: expected extents from 0 to 2^63 - 1, found {}", printable(extent.dump())));
      extents.push_back(extent.get<std::int64_t>());
    }
    return extents;
  }

  std::pair<std::uint64_t, std::uint64_t> offsets(const std::string& tensor, const Json& value) const {
    if (!value.is_array() || value.size() != 2 || !value[0].is_number_unsigned() || !value[1].is_number_unsigned())
      reject_tensor(tensor, "data_offsets: expected two numbers that are not negative");
    const auto begin = value[0].get<std::uint64_t>(), end = value[1].get<std::uint64_t>();
    if (begin > end) reject_tensor(tensor, fmt::format("data_offsets: {} is behind {}", begin, end));
    if (end > header_.data.size())
      reject_tensor(tensor, fmt::format("data_offsets end at {}, but the file has only {} bytes of data", end,
                                        header_.data.size()));
    return {begin, end};
  }

  /// Every byte of data belongs to exactly one tensor.
  void check_coverage() const {
    std::vector<std::pair<const std::string*, const TensorInfo*>> ordered;
    ordered.reserve(header_.tensors.size());
    for (const auto& [tensor, info] : header_.tensors) ordered.emplace_back(&tensor, &info);
    std::ranges::sort(ordered, {}, [](const auto& entry) { return std::pair(entry.second->begin, entry.second->end); });
    std::uint64_t covered = 0;
    for (const auto& [tensor, info] : ordered) {
      if (info->begin < covered)
        reject_tensor(*tensor, fmt::format("overlaps another tensor at data offset {}", info->begin));
      if (info->begin > covered)
        reject_tensor(*tensor,
                      fmt::format("begins at data offset {}, which leaves a hole behind {}", info->begin, covered));
      covered = info->end;
    }
    if (covered != header_.data.size())
      reject(fmt::format("the tensors end at data offset {}, but the file has {} bytes of data", covered,
                         header_.data.size()));
  }

  Bytes file_;
  const std::string& name_;
  Header header_;
};

}  // namespace

std::int64_t TensorInfo::count() const { return static_cast<std::int64_t>((end - begin) / size_of(dtype)); }

struct SafetensorsFile::Impl {
  std::string name;
  Mapping mapping;
  std::vector<std::byte> copy;
  Header header;
};

SafetensorsFile::SafetensorsFile(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {
  const Bytes file = impl_->copy.empty() ? impl_->mapping.bytes() : Bytes(impl_->copy);
  impl_->header = HeaderParser(file, impl_->name).parse();
}
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;
SafetensorsFile::~SafetensorsFile() = default;

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  auto impl = std::make_unique<Impl>();
  impl->name = safe_line(path.string());
  impl->mapping = map_file(path);
  return SafetensorsFile(std::move(impl));
}

SafetensorsFile SafetensorsFile::parse(std::span<const std::byte> bytes, std::string name) {
  auto impl = std::make_unique<Impl>();
  impl->name = std::move(name);
  impl->copy.assign(bytes.begin(), bytes.end());
  return SafetensorsFile(std::move(impl));
}

const std::string& SafetensorsFile::name() const { return impl_->name; }
const std::map<std::string, std::string>& SafetensorsFile::metadata() const { return impl_->header.metadata; }
const std::map<std::string, TensorInfo>& SafetensorsFile::tensors() const { return impl_->header.tensors; }

bool SafetensorsFile::has(std::string_view tensor) const { return tensors().contains(std::string(tensor)); }

const TensorInfo& SafetensorsFile::info(std::string_view tensor) const {
  const auto found = tensors().find(std::string(tensor));
  if (found == tensors().end())
    throw Error{ErrorKind::bad_input, fmt::format("{}: there is no tensor '{}'", name(), printable(tensor))};
  return found->second;
}

std::span<const std::byte> SafetensorsFile::bytes(std::string_view tensor) const {
  const TensorInfo& found = info(tensor);
  return impl_->header.data.subspan(found.begin, found.end - found.begin);
}

template <typename T>
std::vector<T> SafetensorsFile::read(std::string_view tensor, const std::vector<std::int64_t>& shape) const {
  const TensorInfo& found = info(tensor);
  constexpr DType expected = detail::dtype_of<T>();
  const bool fits = found.dtype == expected &&
                    std::ranges::equal(found.shape, shape, [](auto is, auto want) { return want == -1 || is == want; });
  if (!fits)
    throw Error{ErrorKind::bad_input,
                fmt::format("{}: tensor '{}': expected {} {}, found {} {}", name(), printable(tensor),
                            detail::safetensors_name(expected), shape_text(shape),
                            detail::safetensors_name(found.dtype), shape_text(found.shape))};
  std::vector<T> values(static_cast<std::size_t>(found.count()));
  const Bytes raw = bytes(tensor);
  if (!raw.empty()) std::memcpy(values.data(), raw.data(), raw.size());
  return values;
}

template std::vector<float> SafetensorsFile::read(std::string_view, const std::vector<std::int64_t>&) const;
template std::vector<double> SafetensorsFile::read(std::string_view, const std::vector<std::int64_t>&) const;
template std::vector<std::int8_t> SafetensorsFile::read(std::string_view, const std::vector<std::int64_t>&) const;
template std::vector<std::uint8_t> SafetensorsFile::read(std::string_view, const std::vector<std::int64_t>&) const;
template std::vector<std::uint16_t> SafetensorsFile::read(std::string_view, const std::vector<std::int64_t>&) const;
template std::vector<std::int64_t> SafetensorsFile::read(std::string_view, const std::vector<std::int64_t>&) const;

}  // namespace kvq
