#pragma once

#include <kvq/container/json.h>
#include <kvq/container/safetensors.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <vector>

// The input of the manifest fuzzers. A mutation of a safetensors file nearly always breaks a length, an offset or the
// hash. The fuzzers therefore mutate a text in three parts, of which the last two may be missing:
//
//   the manifest, on one line
//   the tensors as in the header of a safetensors file, without offsets, on one line
//   their data one after the other, cut or filled with zeros to the size that they take
//
// container_of() makes a container from the text and copies `version` and `requires` from the manifest, so that
// mutations reach the schema and all later checks.
namespace kvq::fuzz {

struct ContainerText {
  std::string manifest;
  Json tensors = Json::object();
  std::vector<std::byte> data;
};

/// Takes the text up to the next newline, and removes the newline.
inline std::string take_line(std::string_view& text) {
  const std::size_t end = std::min(text.find('\n'), text.size());
  const std::string line(text.substr(0, end));
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

constexpr int kMostBytes = 1 << 16;  ///< of a tensor; also the upper limit of natural()

/// An unsigned number up to kMostBytes + 1; 0 for any other value.
inline int natural(const Json& value) {
  return value.is_number_unsigned()
             ? static_cast<int>(std::min<std::uint64_t>(value.get<std::uint64_t>(), kMostBytes + 1))
             : 0;
}

/// Bytes of a tensor; 0 if the shape is invalid or the tensor would be larger than kMostBytes.
inline int tensor_bytes(const Json& info) {
  const auto dtype = info.at("dtype").get<std::string>();
  std::int64_t bytes = dtype.ends_with("64") ? 8 : dtype.ends_with("32") ? 4 : dtype.ends_with("16") ? 2 : 1;
  for (const Json& extent : info.at("shape"))
    if ((bytes *= natural(extent)) > kMostBytes) return 0;
  return static_cast<int>(bytes);
}

/// @throws Error{bad_input} if the second line is not JSON
inline ContainerText parse_text(const std::uint8_t* bytes, std::size_t size) {
  std::string_view text(reinterpret_cast<const char*>(bytes), size);
  ContainerText parts;
  parts.manifest = take_line(text);
  if (text.empty()) return parts;
  parts.tensors = parse_json(take_line(text), "tensors");
  std::size_t end = 0;
  try {
    for (Json& info : parts.tensors) {
      const std::size_t begin = end;
      end += static_cast<std::size_t>(tensor_bytes(info));
      info["data_offsets"] = {begin, end};
    }
  } catch (const Json::exception&) {  // the reader under test reports the fault
  }
  const auto data = std::as_bytes(std::span(text));
  parts.data.assign(data.begin(), data.end());
  parts.data.resize(end);
  return parts;
}

/// The metadata words `version` and `requires`, copied from the manifest.
inline Json repeated_words(const std::string& text) {
  Json metadata = {{"version", "1.0"}, {"requires", ""}};
  const Json manifest = Json::parse(text, nullptr, false);
  if (!manifest.is_object()) return metadata;
  if (manifest.contains("version") && manifest["version"].is_string()) metadata["version"] = manifest["version"];
  std::string words;
  if (manifest.contains("requires") && manifest["requires"].is_array())
    for (const Json& word : manifest["requires"])
      if (word.is_string()) words += (words.empty() ? "" : ",") + word.get<std::string>();
  metadata["requires"] = words;
  return metadata;
}

/// @param hash  content hash for the metadata; none if empty
inline std::vector<std::byte> container_of(const ContainerText& parts, const std::string& format,
                                           const std::string& hash = {}) {
  Json metadata = repeated_words(parts.manifest);
  metadata["format"] = format;
  metadata["kvq.manifest"] = parts.manifest;
  if (!hash.empty()) metadata["kvq.content_hash"] = hash;
  Json table = parts.tensors.is_object() ? parts.tensors : Json::object();
  table["__metadata__"] = std::move(metadata);
  std::string header = table.dump(-1, ' ', false, Json::error_handler_t::replace);
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = header.size();
  std::vector<std::byte> bytes(sizeof length + header.size());
  std::memcpy(bytes.data(), &length, sizeof length);
  std::memcpy(bytes.data() + sizeof length, header.data(), header.size());
  bytes.insert(bytes.end(), parts.data.begin(), parts.data.end());
  return bytes;
}

/// The same with the right content hash. @throws Error{bad_input, unsupported} if the result is no safetensors file
inline std::vector<std::byte> hashed_container_of(const ContainerText& parts, const std::string& format) {
  const SafetensorsFile file = SafetensorsFile::parse(container_of(parts, format), "fuzz");
  return container_of(parts, format, content_hash(file, file.metadata().at("kvq.manifest")));
}

/// Converts a container to such a text, for seeds.
inline std::string text_of(const std::filesystem::path& container) {
  std::ifstream file(container, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  Json tensors = Json::parse(bytes.substr(sizeof length, length));
  const auto manifest = tensors.at("__metadata__").at("kvq.manifest").get<std::string>();
  tensors.erase("__metadata__");
  for (Json& info : tensors) info.erase("data_offsets");
  return manifest + "\n" + tensors.dump() + "\n" + bytes.substr(sizeof length + length);
}

}  // namespace kvq::fuzz
