#include "calibrate/collect.h"

#include <kvq/core/error.h>
#include <kvq/dump/keep_tokens.h>
#include <kvq/stats/golden_tokens.h>

#include <algorithm>
#include <chrono>
#include <system_error>

namespace kvq {

namespace fs = std::filesystem;

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

StatsHeader header_of(const Dump& dump, const StatsRequest& request) {
  return {dump.model(), dump.producer(), to_string(dump.capture_point()), request.seed, request.sample_tokens};
}

StatsRequest restrict_to_layer(StatsRequest request, const LayerEntry& layer) {
  if (!layer.has_values)
    std::erase_if(request.moments,
                  [](Moment moment) { return side_of(moment) == Side::v || moment == Moment::scored_query; });
  return request;
}

namespace {

/// Whether a shard of an earlier run holds the statistics that this run would collect from `layer`.
bool is_valid_shard(const fs::path& path, const LayerActivations& layer, const StatsHeader& header,
                    const StatsRequest& request) {
  if (!fs::exists(path)) return false;
  try {
    const StatsFile shard = StatsFile::open(path);
    const StatsHeader& found = shard.header();
    if (found.seed != header.seed || found.sample_tokens != header.sample_tokens || found.range != header.range ||
        found.model.fingerprint != header.model.fingerprint || found.model.name != header.model.name ||
        found.producer != header.producer || found.capture_point != header.capture_point ||
        found.model.num_layers != header.model.num_layers || found.model.config_json != header.model.config_json)
      return false;
    if (found.model.layers.size() != 1 || shard.content_hash(0) != layer.content_hash) return false;
    const LayerStats stats = shard.load(0);
    std::set<Moment> moments = request.moments;
    if (moments.count(Moment::sst)) moments.insert(Moment::query);
    if (moments.count(Moment::scored_query)) moments.insert(Moment::scored_value);
    if (stats.moments.size() != moments.size()) return false;
    const TokenRange held =
        request.held_out_tokens > 0 ? choose_held_out(layer, request.held_out_tokens) : TokenRange{};
    if (held.count != (stats.held_out ? stats.held_out->count() : 0)) return false;  // the range follows from the count
    const bool has_metric = layer.v && !(layer.o_proj.empty() && layer.o_proj_metric.empty());
    if (stats.o_proj_metric.empty() == has_metric) return false;
    if (choose_golden(layer, request.golden_tokens, held).count != (stats.golden ? stats.golden->count : 0))
      return false;  // the golden range follows from its count
    return stats.layer == layer.layer && stats.geometry == layer.geometry &&
           std::all_of(moments.begin(), moments.end(), [&](Moment m) { return stats.moments.count(m) != 0; });
  } catch (const Error&) {
    return false;  // truncated or foreign: the caller collects the layer again
  }
}

/// Shows progress with the run's mean tokens per second.
class Meter {
 public:
  Meter(Progress& progress, std::size_t layers)
      : progress_(progress), layers_(layers), start_(std::chrono::steady_clock::now()) {}
  void show(std::size_t index, int layer, double work_before, double work_of_layer, double part, double tokens_done) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
    progress_.update(work_before + part * work_of_layer,
                     fmt::format("layer {} ({}/{})  {:.0f} tokens/s", layer, index + 1, layers_,
                                 tokens_done / std::max(elapsed.count(), 1e-3)));
  }

 private:
  Progress& progress_;
  std::size_t layers_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace

StatsOrigin collect_shards(const Dump& dump, const std::vector<LayerEntry>& layers, const StatsRequest& request,
                           const TokenRange& tokens, const fs::path& folder, bool resume, bool quiet) {
  std::error_code failed;
  if (!resume) fs::remove_all(folder, failed);
  fs::create_directories(folder, failed);
  if (failed)
    throw Error{ErrorKind::io, fmt::format("{}: cannot create the folder: {}", folder.string(), failed.message())};

  StatsOrigin origin;
  origin.header = header_of(dump, request);
  if (tokens.count < dump.num_tokens()) origin.header.range = tokens;
  origin.header.model.layers = layers;
  const std::vector<std::int64_t> one_sequence{0, tokens.count};
  double total = 0.0, done = 0.0;
  for (const LayerEntry& entry : layers)
    total += collect_flops(entry.geometry, one_sequence, restrict_to_layer(request, entry));
  Progress progress(total, quiet);
  Meter meter(progress, layers.size());

  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LayerEntry& entry = layers[i];
    const fs::path path = folder / fmt::format("layer-{:04d}.safetensors", entry.layer);
    const StatsRequest layer_request = restrict_to_layer(request, entry);
    const double work = collect_flops(entry.geometry, one_sequence, layer_request);
    LayerActivations activations = dump.load_layer(entry.layer);
    keep_tokens(activations, tokens.first, tokens.count);
    std::shared_ptr<const LayerStats> last;
    if (!resume || !is_valid_shard(path, activations, origin.header, layer_request)) {
      auto stats = std::make_shared<const LayerStats>(
          collect(activations, layer_request, [&](std::int64_t rows, std::int64_t all) {
            const double part = static_cast<double>(rows) / static_cast<double>(all);
            meter.show(i, entry.layer, done, work, part,
                       (static_cast<double>(i) + part) * static_cast<double>(tokens.count));
          }));
      save_stats(origin.header, std::span(stats.get(), 1), path);
      if (i + 1 == layers.size())
        last = std::move(stats);  // keeps the last layer in memory, which holds one layer anyway
    }
    done += work;
    meter.show(i, entry.layer, done, 0.0, 0.0, static_cast<double>(i + 1) * static_cast<double>(tokens.count));
    const auto sequences = static_cast<std::int64_t>(activations.cu_seqlens.size()) - 1;
    origin.entries.push_back({path, 0, activations.k.tokens, sequences, activations.content_hash, {}, std::move(last)});
  }
  return origin;
}

StatsOrigin open_stats(const fs::path& path, const std::vector<int>& wanted) {
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
