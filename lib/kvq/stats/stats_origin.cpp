#include <kvq/core/error.h>
#include <kvq/stats/stats_origin.h>

#include <fmt/format.h>

#include <algorithm>

namespace kvq {

namespace {

/// Opens a part again. Whoever has replaced the part meanwhile must not decide a layer of this run.
StatsFile open_part(const StatsOrigin::Entry& entry) {
  StatsFile file = StatsFile::open(entry.path);
  if (!entry.file_hash.empty() && file.file_hash() != entry.file_hash)
    throw Error{ErrorKind::bad_input,
                fmt::format("{}: content hash: expected {} as this run collected it, found {}", entry.path.string(),
                            entry.file_hash, file.file_hash()),
                "another program has replaced the file: run again with --resume"};
  return file;
}

}  // namespace

std::shared_ptr<const LayerStats> StatsOrigin::load(std::size_t index) const {
  const Entry& entry = entries.at(index);
  if (entry.stats) return entry.stats;
  if (entry.file) return std::make_shared<LayerStats>(entry.file->load(entry.index));
  return std::make_shared<LayerStats>(open_part(entry).load(entry.index));
}

void merge_parts(const StatsOrigin& origin, const std::filesystem::path& output) {
  std::vector<StatsFile> files;
  files.reserve(origin.entries.size());
  for (const StatsOrigin::Entry& entry : origin.entries) files.push_back(open_part(entry));
  merge_open_files(files, output);
}

std::vector<LayerEntry> choose_layers(const ModelGeometry& model, const std::vector<int>& wanted) {
  if (wanted.empty()) return model.layers;
  std::vector<LayerEntry> chosen;
  for (const int layer : wanted) {
    const auto it = std::find_if(model.layers.begin(), model.layers.end(),
                                 [&](const LayerEntry& entry) { return entry.layer == layer; });
    if (it == model.layers.end())
      throw Error{ErrorKind::usage,
                  fmt::format("--layers: layer {} is not there (the file has {} layers, {} to {})", layer,
                              model.layers.size(), model.layers.front().layer, model.layers.back().layer)};
    chosen.push_back(*it);
  }
  return chosen;
}

StatsOrigin open_stats(const std::filesystem::path& path, const std::vector<int>& wanted) {
  const auto file = std::make_shared<const StatsFile>(StatsFile::open(path));
  StatsOrigin origin;
  origin.header = file->header();
  const std::vector<LayerEntry> chosen = choose_layers(file->header().model, wanted);
  for (std::size_t i = 0; i < file->header().model.layers.size(); ++i) {
    const LayerEntry& entry = file->header().model.layers[i];
    const bool is_chosen =
        std::any_of(chosen.begin(), chosen.end(), [&](const LayerEntry& c) { return c.layer == entry.layer; });
    if (is_chosen)
      origin.entries.push_back({path, i, file->tokens(i), file->sequences(i), file->content_hash(i), file, {}});
  }
  origin.header.model.layers = chosen;
  return origin;
}

}  // namespace kvq
