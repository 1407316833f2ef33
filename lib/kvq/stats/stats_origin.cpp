#include <kvq/core/error.h>
#include <kvq/stats/stats_origin.h>

#include <fmt/format.h>

#include <algorithm>

namespace kvq {

std::shared_ptr<const LayerStats> StatsOrigin::load(std::size_t index) const {
  const Entry& entry = entries.at(index);
  if (entry.stats) return entry.stats;
  const StatsFile* file = entry.file.get();
  return std::make_shared<LayerStats>(file != nullptr ? file->load(entry.index)
                                                      : StatsFile::open(entry.path).load(entry.index));
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
