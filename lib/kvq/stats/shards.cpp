#include <kvq/core/error.h>
#include <kvq/dump/keep_tokens.h>
#include <kvq/stats/golden_tokens.h>
#include <kvq/stats/shards.h>

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <span>
#include <system_error>

namespace kvq {

namespace fs = std::filesystem;

namespace {

bool same_header(const StatsHeader& found, const StatsHeader& wanted) {
  const ModelGeometry &a = found.model, &b = wanted.model;
  return found.seed == wanted.seed && found.sample_tokens == wanted.sample_tokens && found.range == wanted.range &&
         found.queries == wanted.queries && a.fingerprint == b.fingerprint && a.name == b.name &&
         found.producer == wanted.producer && found.capture_point == wanted.capture_point &&
         a.num_layers == b.num_layers && a.config_json == b.config_json;
}

/// Whether the statistics have the moments that collect() would compute for the request.
bool same_moments(const LayerStats& stats, std::set<Moment> moments) {
  if (moments.count(Moment::sst)) moments.insert(Moment::query);
  if (moments.count(Moment::scored_query)) moments.insert(Moment::scored_value);
  return stats.moments.size() == moments.size() &&
         std::all_of(moments.begin(), moments.end(), [&](Moment m) { return stats.moments.count(m) != 0; });
}

/// Whether the statistics hold out the tokens, and keep the golden tokens, that collect() would choose. Both ranges
/// follow from their counts.
bool same_tokens(const LayerStats& stats, const LayerActivations& layer, const StatsRequest& request) {
  const TokenRange held = request.held_out_tokens > 0 ? choose_held_out(layer, request.held_out_tokens) : TokenRange{};
  return held.count == (stats.held_out ? stats.held_out->count() : 0) &&
         choose_golden(layer, request.golden_tokens, held).count == (stats.golden ? stats.golden->count : 0);
}

/// Whether a shard of an earlier run holds the statistics that this run would collect from `layer`.
bool is_valid_shard(const fs::path& path, const LayerActivations& layer, const StatsHeader& header,
                    const StatsRequest& request) {
  if (!fs::exists(path)) return false;
  try {
    const StatsFile shard = StatsFile::open(path);
    if (!same_header(shard.header(), header)) return false;
    if (shard.header().model.layers.size() != 1 || shard.content_hash(0) != layer.content_hash) return false;
    const LayerStats stats = shard.load(0);
    const bool has_metric = layer.v && !(layer.o_proj.empty() && layer.o_proj_metric.empty());
    return stats.layer == layer.layer && stats.geometry == layer.geometry &&
           stats.o_proj_metric.empty() != has_metric && same_moments(stats, request.moments) &&
           same_tokens(stats, layer, request);
  } catch (const Error&) {
    return false;  // truncated or foreign: the caller collects the layer again
  }
}

double work_of_layer(const CollectRequest& request, const LayerEntry& layer) {
  return collect_flops(layer.geometry, {0, request.tokens.count}, restrict_to_layer(request.stats, layer));
}

void make_folder(const fs::path& folder, bool keep) {
  std::error_code failed;
  if (!keep) fs::remove_all(folder, failed);
  fs::create_directories(folder, failed);
  if (failed)
    throw Error{ErrorKind::io, fmt::format("{}: cannot create the folder: {}", folder.string(), failed.message())};
}

}  // namespace

TokenRange choose_tokens(std::int64_t tokens, std::int64_t first, std::optional<std::int64_t> count) {
  const std::int64_t rest = tokens - first;
  if (rest < 1 || count.value_or(rest) > rest)
    throw Error{ErrorKind::usage, fmt::format("--first-token {}{}: the dump has {} tokens", first,
                                              count ? fmt::format(" and --num-tokens {}", *count) : "", tokens)};
  return {first, count.value_or(rest)};
}

StatsHeader header_of(const Dump& dump, const StatsRequest& request) {
  return {dump.model(), dump.producer(),       to_string(dump.capture_point()),
          request.seed, request.sample_tokens, request.queries};
}

StatsRequest restrict_to_layer(StatsRequest request, const LayerEntry& layer) {
  if (!layer.has_values)
    std::erase_if(request.moments,
                  [](Moment moment) { return side_of(moment) == Side::v || moment == Moment::scored_query; });
  return request;
}

double collect_work(const CollectRequest& request) {
  double work = 0.0;
  for (const LayerEntry& layer : request.layers) work += work_of_layer(request, layer);
  return work;
}

StatsOrigin collect_shards(const Dump& dump, const CollectRequest& request, const fs::path& folder, bool resume,
                           const SayProgress& say) {
  make_folder(folder, resume);
  StatsOrigin origin;
  origin.header = header_of(dump, request.stats);
  if (request.tokens.count < dump.num_tokens()) origin.header.range = request.tokens;
  origin.header.model.layers = request.layers;
  const auto tokens = static_cast<double>(request.tokens.count);
  double done = 0.0;
  for (std::size_t i = 0; i < request.layers.size(); ++i) {
    const LayerEntry& entry = request.layers[i];
    const fs::path path = folder / fmt::format("layer-{:04d}.safetensors", entry.layer);
    const StatsRequest layer_request = restrict_to_layer(request.stats, entry);
    const double work = work_of_layer(request, entry);
    /// @param part  of the layer that is done, 0..1
    const auto say_part = [&](double part) {
      if (say) say({done + part * work, i, entry.layer, (static_cast<double>(i) + part) * tokens});
    };
    LayerActivations activations = dump.load_layer(entry.layer);
    keep_tokens(activations, request.tokens.first, request.tokens.count);
    std::shared_ptr<const LayerStats> last;
    if (!resume || !is_valid_shard(path, activations, origin.header, layer_request)) {
      auto stats = std::make_shared<const LayerStats>(
          collect(activations, layer_request, [&](std::int64_t rows, std::int64_t all) {
            say_part(static_cast<double>(rows) / static_cast<double>(all));
          }));
      save_stats(origin.header, std::span(stats.get(), 1), path);
      if (i + 1 == request.layers.size())
        last = std::move(stats);  // keeps the last layer in memory, which holds one layer anyway
    }
    say_part(1.0);
    done += work;
    const auto sequences = static_cast<std::int64_t>(activations.cu_seqlens.size()) - 1;
    origin.entries.push_back({path, 0, activations.k.tokens, sequences, activations.content_hash, {}, std::move(last)});
  }
  return origin;
}

}  // namespace kvq
