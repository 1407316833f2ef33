#include "support/container_edit.h"

#include <cstring>
#include <fstream>
#include <iterator>

namespace kvq::test {

EditableFile EditableFile::read(const std::filesystem::path& path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  EditableFile edit{.tensors = {}, .metadata = file.metadata(), .manifest = {}};
  edit.manifest = parse_json(edit.metadata.at("kvq.manifest"), path.string());
  for (const auto& [name, info] : file.tensors()) {
    const auto bytes = file.bytes(name);
    edit.tensors[name] = {info.dtype, info.shape, {bytes.begin(), bytes.end()}};
  }
  return edit;
}

void EditableFile::write(const std::filesystem::path& path, bool fit_hash) const {
  SafetensorsWriter writer;
  for (const auto& [name, tensor] : tensors) writer.add(name, tensor.dtype, tensor.shape, tensor.data);
  for (const auto& [key, value] : metadata) writer.set_metadata(key, value);
  const std::string text = canonical_json(manifest);
  writer.set_metadata("kvq.manifest", text);
  if (fit_hash) writer.set_metadata("kvq.content_hash", writer.content_hash(text));
  writer.write(path);
}

void EditableFile::set_float(const std::string& tensor, std::size_t index, float value) {
  std::memcpy(tensors.at(tensor).data.data() + 4 * index, &value, 4);
}

std::string file_bytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace kvq::test
