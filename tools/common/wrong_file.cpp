#include "common/wrong_file.h"

#include <kvq/core/text.h>

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <string_view>

namespace kvq {

namespace fs = std::filesystem;

namespace {

enum class FileType { unknown, model_folder, hub_name, dump, artifact, statistics, safetensors, gguf, text };

constexpr std::size_t kBytesRead = 4096;  // metadata of an artifact stands at the beginning of its header

/// The first bytes of a regular file; empty for anything else.
std::string first_bytes(const std::string& path) {
  std::error_code failed;
  if (!fs::is_regular_file(path, failed)) return {};
  std::string bytes(kBytesRead, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  bytes.resize(static_cast<std::size_t>(std::max<std::streamsize>(file.gcount(), 0)));
  return bytes;
}

/// The format that the metadata of a safetensors file names.
FileType safetensors_type(std::string_view header) {
  if (header.find("\"kvq-artifact\"") != std::string_view::npos) return FileType::artifact;
  if (header.find("\"kvq-stats\"") != std::string_view::npos) return FileType::statistics;
  if (header.find("\"kvq.") != std::string_view::npos) return FileType::unknown;  // of another version of kvq
  return FileType::safetensors;
}

bool is_text(std::string_view bytes) {
  const std::string_view whole =
      bytes.substr(0, bytes.size() > 4 ? bytes.size() - 4 : 0);  // may end inside a character
  return !whole.empty() && bytes.find('\0') == std::string_view::npos && is_utf8(whole.substr(0, whole.rfind(' ')));
}

bool is_one_of(char c, std::string_view marks) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || marks.find(c) != std::string_view::npos;
}

bool consists_of(std::string_view word, std::string_view marks) {
  return !word.empty() && std::all_of(word.begin(), word.end(), [&](char c) { return is_one_of(c, marks); });
}

bool is_hub_word(std::string_view word) { return consists_of(word, "_.-") && is_one_of(word.front(), ""); }

/// "Qwen/Qwen3-4B": an owner and a name, with no ending of a file.
bool is_hub_name(std::string_view argument) {
  for (const std::string_view ending : {".h5", ".hdf5", ".safetensors", ".json", ".txt"})
    if (argument.ends_with(ending)) return false;
  const std::size_t slash = argument.find('/');
  return slash != std::string_view::npos && is_hub_word(argument.substr(0, slash)) &&
         is_hub_word(argument.substr(slash + 1));
}

FileType type_of(const std::string& argument) {
  std::error_code failed;
  if (fs::is_directory(argument, failed))
    return fs::exists(fs::path(argument) / "config.json", failed) ? FileType::model_folder : FileType::unknown;
  if (!fs::exists(argument, failed)) return is_hub_name(argument) ? FileType::hub_name : FileType::unknown;
  const std::string bytes = first_bytes(argument);
  const std::string_view view = bytes;
  if (view.starts_with("\x89HDF\r\n\x1a\n")) return FileType::dump;
  if (view.starts_with("GGUF")) return FileType::gguf;
  if (view.size() > 9 && view.substr(8).starts_with("{\"")) return safetensors_type(view.substr(8));
  return is_text(view) ? FileType::text : FileType::unknown;
}

/// A word of a command that the user can paste into a shell.
std::string shell_word(const std::string& word) {
  if (consists_of(word, "_./:@%+,-")) return word;
  std::string quoted = "'";
  for (const char c : printable(word, 200)) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

/// The command that makes a dump of a model.
std::string dump_command(const std::string& model) {
  std::string name = fs::path(model).filename().string();
  if (name.empty() || name == "." || name == "..")
    name = fs::absolute(model).lexically_normal().parent_path().filename().string();
  return fmt::format("scripts/dump_qkv.py {} --text TEXT.txt --output {}", shell_word(model),
                     shell_word((name.empty() ? "model" : name) + ".h5"));
}

}  // namespace

std::string hint_for_dump(const std::string& argument) {
  const std::string file = shell_word(argument);
  switch (type_of(argument)) {
    case FileType::model_folder: return "this is a model; dump its activations first: " + dump_command(argument);
    case FileType::hub_name:
      return "if this is a model on the hub, dump its activations first: " + dump_command(argument);
    case FileType::artifact: return fmt::format("this is an artifact, which kvq-inspect {} shows", file);
    case FileType::statistics:
      return fmt::format("these are statistics: kvq-calibrate --stats {} --output OUT.safetensors", file);
    case FileType::safetensors:
      return "these are weights; dump the activations of their model: " +
             dump_command(fs::path(argument).parent_path().empty() ? "." : fs::path(argument).parent_path().string());
    case FileType::gguf: return "a dump is made of a Hugging Face model: scripts/dump_qkv.py --help";
    case FileType::text:
      return fmt::format("this is a text; run a model over it: scripts/dump_qkv.py MODEL --text {} --output DUMP.h5",
                         file);
    case FileType::dump:
    case FileType::unknown: break;
  }
  return {};
}

std::string hint_for_artifact(const std::string& argument) {
  const std::string file = shell_word(argument);
  switch (type_of(argument)) {
    case FileType::dump: return fmt::format("this is an HDF5 file; if it is a dump: kvq-calibrate {}", file);
    case FileType::statistics:
      return fmt::format("these are statistics: kvq-calibrate --stats {} --output OUT.safetensors", file);
    case FileType::model_folder: return "this is a model; " + dump_command(argument) + ", then kvq-calibrate";
    case FileType::hub_name:
      return "an artifact is a file of kvq-calibrate; a model is dumped first: " + dump_command(argument);
    case FileType::safetensors: return "these are weights of a model; an artifact is a file of kvq-calibrate";
    case FileType::gguf:
    case FileType::text: return "an artifact is a file of kvq-calibrate";
    case FileType::artifact:
    case FileType::unknown: break;
  }
  return {};
}

}  // namespace kvq
