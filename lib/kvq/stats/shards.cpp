#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/dump/keep_tokens.h>
#include <kvq/stats/golden_tokens.h>
#include <kvq/stats/shards.h>

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <utility>

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
/// @throws Error if the shard is damaged
bool is_same_shard(const StatsFile& shard, const LayerActivations& layer, const StatsHeader& header,
                   const StatsRequest& request) {
  if (!same_header(shard.header(), header)) return false;
  if (shard.header().model.layers.size() != 1 || shard.content_hash(0) != layer.content_hash) return false;
  const LayerStats stats = shard.load(0);
  const bool has_metric = layer.v && !(layer.o_proj.empty() && layer.o_proj_metric.empty());
  return stats.layer == layer.layer && stats.geometry == layer.geometry && stats.o_proj_metric.empty() != has_metric &&
         same_moments(stats, request.moments) && same_tokens(stats, layer, request);
}

/// The file hash of a shard of an earlier run, if the shard holds what this run would collect from `layer`; else empty.
std::string hash_of_old_shard(const fs::path& path, const LayerActivations& layer, const StatsHeader& header,
                              const StatsRequest& request) {
  if (!fs::exists(path)) return {};
  try {
    const StatsFile shard = StatsFile::open(path);
    return is_same_shard(shard, layer, header, request) ? shard.file_hash() : std::string();
  } catch (const Error&) {
    return {};  // truncated or foreign: the caller collects the layer again
  }
}

double work_of_layer(const CollectRequest& request, const LayerEntry& layer) {
  return collect_flops(layer.geometry, {0, request.tokens.count}, restrict_to_layer(request.stats, layer));
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

std::uintmax_t least_bytes(const CollectRequest& request) {
  constexpr double kMomentBytes = 8.0, kSampleBytes = 2.0;
  double bytes = 0.0;
  for (const LayerEntry& layer : request.layers) {
    const LayerGeometry& g = layer.geometry;
    for (const Moment moment : restrict_to_layer(request.stats, layer).moments) {
      const double dim = g.dim(side_of(moment));
      bytes += kMomentBytes * g.num_kv_heads * dim * dim;
    }
    const double channels =
        (g.num_q_heads + g.num_kv_heads) * g.head_dim + (layer.has_values ? g.num_kv_heads * g.v_head_dim : 0);
    const std::int64_t in_statistics = std::max<std::int64_t>(request.tokens.count - request.stats.held_out_tokens, 0);
    bytes += kSampleBytes * channels * static_cast<double>(std::min(request.stats.sample_tokens, in_statistics));
  }
  return static_cast<std::uintmax_t>(bytes);
}

namespace {

/// Layers in work at a time. If the backend leaves processors free, they read, check and save other layers while the
/// backend is at one. All may be in memory, so large layers are two at a time.
int layers_in_work(const Dump& dump, const CollectRequest& request, const Backend& backend) {
  constexpr std::int64_t kLeast = 2, kMost = 6, kBytes = std::int64_t{2} << 30;
  if (!backend.leaves_processors_free()) return 1;
  std::int64_t largest = 1;
  for (const LayerEntry& entry : request.layers) largest = std::max(largest, dump.layer_bytes(entry.layer));
  return static_cast<int>(std::clamp(kBytes / largest, kLeast, kMost));
}

/// Adds up the work of layers that are collected at the same time, and says it.
class ProgressSum {
 public:
  ProgressSum(const CollectRequest& request, const SayProgress& say)
      : request_(request), say_(say), parts_(request.layers.size(), 0.0) {
    for (const LayerEntry& layer : request.layers) work_.push_back(work_of_layer(request, layer));
  }

  /// @param part  of the layer that is done, 0..1
  void layer_is_at(std::size_t i, double part) {
    if (!say_) return;
    const std::lock_guard lock(mutex_);
    parts_[i] = std::max(parts_[i], part);
    while (lowest_ + 1 < parts_.size() && parts_[lowest_] >= 1.0) ++lowest_;
    CollectProgress now{.index = lowest_, .layer = request_.layers[lowest_].layer};
    for (std::size_t layer = 0; layer < parts_.size(); ++layer) {
      now.done += parts_[layer] * work_[layer];
      now.tokens += parts_[layer] * static_cast<double>(request_.tokens.count);
    }
    say_(now);
  }

 private:
  const CollectRequest& request_;
  const SayProgress& say_;
  std::mutex mutex_;
  std::vector<double> work_, parts_;  ///< of each layer
  std::size_t lowest_ = 0;            ///< layer that is not done
};

}  // namespace

StatsOrigin collect_shards(const Dump& dump, const CollectRequest& request, const PartsFolder& parts, bool resume,
                           Backend& backend, const SayProgress& say) {
  StatsOrigin origin;
  origin.header = header_of(dump, request.stats);
  if (request.tokens.count < dump.num_tokens()) origin.header.range = request.tokens;
  origin.header.model.layers = request.layers;
  origin.entries.resize(request.layers.size());
  ProgressSum progress(request, say);

  const auto collect_layer = [&](std::size_t i) {
    const LayerEntry& layer = request.layers[i];
    const StatsRequest layer_request = restrict_to_layer(request.stats, layer);
    auto activations = std::make_optional(dump.load_layer(layer.layer));
    keep_tokens(*activations, request.tokens.first, request.tokens.count);
    StatsOrigin::Entry& entry = origin.entries[i];
    entry.path = parts.part(origin.header, layer_request, *activations);
    entry.index = 0;
    entry.tokens = activations->k.tokens;
    entry.sequences = static_cast<std::int64_t>(activations->cu_seqlens.size()) - 1;
    entry.content_hash = activations->content_hash;
    if (resume) entry.file_hash = hash_of_old_shard(entry.path, *activations, origin.header, layer_request);
    if (entry.file_hash.empty()) {
      auto stats = std::make_shared<const LayerStats>(
          collect(*activations, layer_request, backend, [&](std::int64_t rows, std::int64_t all) {
            progress.layer_is_at(i, static_cast<double>(rows) / static_cast<double>(all));
          }));
      activations.reset();
      entry.file_hash = save_stats(origin.header, std::span(stats.get(), 1), entry.path);
      if (i + 1 == request.layers.size())
        entry.stats = std::move(stats);  // keeps the last layer in memory, which holds one layer anyway
    }
    progress.layer_is_at(i, 1.0);
  };
  ordered_parallel_for(
      static_cast<std::int64_t>(request.layers.size()), layers_in_work(dump, request, backend),
      [&](std::int64_t i) { collect_layer(static_cast<std::size_t>(i)); }, [](std::int64_t) {});
  return origin;
}

}  // namespace kvq
