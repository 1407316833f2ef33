#include <kvq/container/atomic_file.h>
#include <kvq/container/json.h>
#include <kvq/container/safetensors.h>
#include <kvq/container/safetensors_format.h>
#include <kvq/core/error.h>

#include <xxhash.h>

#include <array>
#include <cstring>
#include <memory>
#include <utility>

namespace kvq {
namespace {

/// The content hash of formats/artifact.md, fed tensor by tensor in order of name.
class ContentHasher {
 public:
  explicit ContentHasher(std::string_view manifest) : state_(XXH3_createState(), &XXH3_freeState) {
    KVQ_ASSERT(state_ != nullptr);
    XXH3_128bits_reset(state_.get());
    add_text(manifest);
  }

  void add_tensor(std::string_view name, DType dtype, const std::vector<std::int64_t>& shape,
                  std::span<const std::span<const std::byte>> pieces) {
    add_text(name);
    add_text(detail::safetensors_name(dtype));
    add(shape.data(), shape.size() * sizeof(std::int64_t));
    for (const auto piece : pieces) add(piece.data(), piece.size());
  }

  std::string result() const {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state_.get()));
    std::string text = "xxh3-128:";
    for (const unsigned char byte : canonical.digest) text += fmt::format("{:02x}", byte);
    return text;
  }

 private:
  void add(const void* data, std::size_t size) {
    if (size > 0) XXH3_128bits_update(state_.get(), data, size);
  }
  void add_text(std::string_view text) {
    constexpr char kEnd = '\0';
    add(text.data(), text.size());
    add(&kEnd, 1);
  }

  std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state_;
};

}  // namespace

void SafetensorsWriter::add(const std::string& name, DType dtype, std::vector<std::int64_t> shape,
                            std::vector<std::byte> data) {
  const std::span<const std::byte> piece(data);  // valid after the move, because a moved vector keeps its memory
  add_view(name, dtype, std::move(shape), {piece});
  entries_.at(name).data = std::move(data);
}

void SafetensorsWriter::add_view(std::string name, DType dtype, std::vector<std::int64_t> shape,
                                 std::vector<std::span<const std::byte>> pieces) {
  std::uint64_t bytes = 0;
  for (const auto piece : pieces) bytes += piece.size();
  const auto expected = detail::tensor_bytes(dtype, shape);
  KVQ_ASSERT(expected && std::cmp_equal(*expected, bytes));
  KVQ_ASSERT(name != detail::kMetadataKey);
  Entry entry{dtype, std::move(shape), std::move(pieces), {}, bytes};
  const bool is_new = entries_.emplace(std::move(name), std::move(entry)).second;
  KVQ_ASSERT(is_new);
}

// NOLINTBEGIN(performance-unnecessary-value-param): the check does not see the move in an uninstantiated template.
template <typename T>
void SafetensorsWriter::add(std::string name, std::vector<std::int64_t> shape, std::span<const T> values) {
  const auto bytes = std::as_bytes(values);
  add(std::move(name), detail::dtype_of<T>(), std::move(shape), std::vector<std::byte>(bytes.begin(), bytes.end()));
}
// NOLINTEND(performance-unnecessary-value-param)

template void SafetensorsWriter::add(std::string, std::vector<std::int64_t>, std::span<const float>);
template void SafetensorsWriter::add(std::string, std::vector<std::int64_t>, std::span<const double>);
template void SafetensorsWriter::add(std::string, std::vector<std::int64_t>, std::span<const std::int8_t>);
template void SafetensorsWriter::add(std::string, std::vector<std::int64_t>, std::span<const std::uint8_t>);
template void SafetensorsWriter::add(std::string, std::vector<std::int64_t>, std::span<const std::uint16_t>);
template void SafetensorsWriter::add(std::string, std::vector<std::int64_t>, std::span<const std::int64_t>);

void SafetensorsWriter::set_metadata(std::string key, std::string value) {
  metadata_.insert_or_assign(std::move(key), std::move(value));
}

std::string SafetensorsWriter::content_hash(std::string_view manifest) const {
  ContentHasher hasher(manifest);
  for (const auto& [name, entry] : entries_) hasher.add_tensor(name, entry.dtype, entry.shape, entry.pieces);
  return hasher.result();
}

std::string content_hash(const SafetensorsFile& file, std::string_view manifest) {
  ContentHasher hasher(manifest);
  for (const auto& [name, info] : file.tensors()) {
    const auto data = file.bytes(name);
    hasher.add_tensor(name, info.dtype, info.shape, std::span(&data, 1));
  }
  return hasher.result();
}

void SafetensorsWriter::write(const std::filesystem::path& path) const {
  Json header = Json::object();
  if (!metadata_.empty()) header[std::string(detail::kMetadataKey)] = metadata_;
  std::uint64_t offset = 0;
  for (const auto& [name, entry] : entries_) {
    header[name] = {{"dtype", detail::safetensors_name(entry.dtype)},
                    {"shape", entry.shape},
                    {"data_offsets", {offset, offset + entry.bytes}}};
    offset += entry.bytes;
  }
  std::string text = canonical_json(header);
  text.append((8 - text.size() % 8) % 8, ' ');
  if (text.size() > detail::kMaxHeaderBytes)
    throw Error{ErrorKind::unsupported, fmt::format("{}: header of {} bytes, expected at most {}", path.string(),
                                                    text.size(), detail::kMaxHeaderBytes)};
  const std::uint64_t length = text.size();

  AtomicFile file(path);
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(std::as_bytes(std::span(text)));
  for (const auto& [name, entry] : entries_)
    for (const auto piece : entry.pieces) file.write(piece);
  file.commit();
}

void write_file_atomically(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  AtomicFile file(path);
  file.write(bytes);
  file.commit();
}

}  // namespace kvq
