#include <kvq/compute/parallel.h>
#include <kvq/container/atomic_file.h>
#include <kvq/container/output_target.h>
#include <kvq/container/temporaries.h>
#include <kvq/core/error.h>
#include <kvq/stats/parts_folder.h>

#include <xxhash.h>

#include <algorithm>
#include <exception>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

namespace kvq {

namespace fs = std::filesystem;

namespace {

constexpr const char* kMarker = "kvq-parts.txt";
constexpr const char* kScratchPrefix = ".kvq-parts-";
constexpr std::string_view kMarkerText =
    "Statistics of layers that an unfinished run of kvq-calibrate has collected. The same command with --resume takes\n"
    "them over. kvq-calibrate removes this folder once its output is written.\n";

bool has_only(std::string_view text, std::string_view allowed) {
  return !text.empty() && text.find_first_not_of(allowed) == std::string_view::npos;
}

/// The text between `begin` and `end`; empty if `name` does not have both.
std::string_view between(std::string_view name, std::string_view begin, std::string_view end) {
  if (name.size() < begin.size() + end.size() || !name.starts_with(begin) || !name.ends_with(end)) return {};
  return name.substr(begin.size(), name.size() - begin.size() - end.size());
}

bool is_part(const fs::path& path) {
  constexpr std::size_t kHashDigits = 16;
  const std::string name = path.filename().string();
  const std::string_view text = between(name, "layer-", ".safetensors");
  const std::size_t dot = std::min(text.find('.'), text.size());
  return has_only(text.substr(0, dot), "0123456789") && text.size() == dot + 1 + kHashDigits &&
         has_only(text.substr(dot + 1), "0123456789abcdef");
}

/// A file that a killed run was writing: see AtomicFile.
bool is_temporary(const fs::path& path) {
  const std::string name = path.filename().string();
  return has_only(between(name, ".kvq-", ".tmp"), "0123456789-");
}

void write_marker(const fs::path& folder) {
  AtomicFile file(folder / kMarker);
  file.write(std::as_bytes(std::span(kMarkerText)));
  file.commit();
}

/// Under a temporary name first, so that no folder without its marker is left if the process is killed here.
void make_folder(const fs::path& path) {
  ScratchFolder folder(folder_of(path) / kScratchPrefix);
  fs::permissions(folder.path(), fs::perms::group_all | fs::perms::others_all, fs::perm_options::add);
  write_marker(folder.path());
  folder.keep_as(path);
}

void refuse_foreign(const fs::path& path, const char* found) {
  throw Error{ErrorKind::bad_input,
              fmt::format("{}: expected a folder that kvq-calibrate made, found {}", path.string(), found),
              "choose another --output, or move it away"};
}

/// Everything that the statistics of a layer depend on, as text.
std::string dependencies(const StatsHeader& header, const StatsRequest& request, const LayerActivations& layer) {
  const ModelGeometry& model = header.model;
  std::string moments;
  for (const Moment moment : request.moments) moments += fmt::format("{} ", to_string(moment));
  const TokenRange range = header.range.value_or(TokenRange{});
  return fmt::format("{}\n{}\n{}\n{}\n{}\n{}\n{}\n{} {}\n{}\n{} {} {} {}\n{}", KVQ_VERSION, model.name,
                     model.fingerprint, model.num_layers, model.config_json, header.producer, header.capture_point,
                     range.first, range.count, moments, request.seed, request.sample_tokens, request.held_out_tokens,
                     request.golden_tokens, layer.content_hash);
}

}  // namespace

PartsFolder::PartsFolder(fs::path path) : path_(std::move(path)) {
  std::error_code failed;
  const fs::file_type type = fs::status(path_, failed).type();
  if (type == fs::file_type::not_found)
    make_folder(path_);
  else if (type != fs::file_type::directory)
    refuse_foreign(path_, "a file");
  else if (!fs::is_regular_file(fs::symlink_status(path_ / kMarker, failed)))
    refuse_foreign(path_, fmt::format("one without {}", kMarker).c_str());
}

std::vector<fs::path> PartsFolder::own_files() const {
  std::vector<fs::path> files;
  std::error_code failed;
  for (const fs::directory_entry& entry : fs::directory_iterator(path_, failed))
    if (entry.is_regular_file(failed) && !entry.is_symlink(failed) && (is_part(entry) || is_temporary(entry)))
      files.push_back(entry.path());
  return files;
}

std::size_t PartsFolder::num_parts() const {
  const auto files = own_files();
  return static_cast<std::size_t>(std::count_if(files.begin(), files.end(), is_part));
}

std::uintmax_t PartsFolder::num_bytes() const {
  std::uintmax_t bytes = 0;
  for (const fs::path& file : own_files()) {
    std::error_code failed;
    const std::uintmax_t size = fs::file_size(file, failed);
    if (!failed) bytes += size;
  }
  return bytes;
}

fs::path PartsFolder::part(const StatsHeader& header, const StatsRequest& request,
                           const LayerActivations& layer) const {
  const std::string text = dependencies(header, request, layer);
  return path_ / fmt::format("layer-{:04d}.{:016x}.safetensors", layer.layer, XXH3_64bits(text.data(), text.size()));
}

bool PartsFolder::remove() const {
  const std::vector<fs::path> files = own_files();
  parallel_for(static_cast<std::int64_t>(files.size()),
               [&](std::int64_t i) {  // the system frees a file's memory slowly
                 std::error_code ignored;
                 fs::remove(files[static_cast<std::size_t>(i)], ignored);
               });
  std::error_code ignored;
  // With files of others the marker stays, so that the next run knows the folder.
  const bool is_alone = std::distance(fs::directory_iterator(path_, ignored), fs::directory_iterator()) == 1;
  if (!is_alone || !fs::exists(path_ / kMarker, ignored)) return false;
  try {
    // Under a temporary name, so that no folder without its marker is left if the process is killed here.
    const ScratchFolder removed(folder_of(path_) / kScratchPrefix);
    fs::rename(path_, removed.path());
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void PartsFolder::remove_if_empty() const {
  if (num_parts() == 0) remove();
}

}  // namespace kvq
