#include <kvq/core/error.h>
#include <kvq/dump/keep_tokens.h>
#include <kvq/stats/golden_tokens.h>
#include <kvq/stats/shards.h>

#include <fmt/format.h>

#include <algorithm>
#include <future>
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

/// The layers of a request in turn. If the backend leaves processors free, the next layer is read while the caller is
/// at this one, so two are in memory.
class LayerReader {
 public:
  LayerReader(const Dump& dump, const CollectRequest& request, bool ahead)
      : dump_(dump), request_(request), ahead_(ahead) {}

  LayerActivations load(std::size_t i) {
    LayerActivations layer = next_.valid() ? next_.get() : read(i);
    if (ahead_ && i + 1 < request_.layers.size())
      next_ = std::async(std::launch::async, [this, i] { return read(i + 1); });
    return layer;
  }

 private:
  LayerActivations read(std::size_t i) const {
    LayerActivations activations = dump_.load_layer(request_.layers[i].layer);
    keep_tokens(activations, request_.tokens.first, request_.tokens.count);
    return activations;
  }

  const Dump& dump_;
  const CollectRequest& request_;
  bool ahead_;
  std::future<LayerActivations> next_;
};

}  // namespace

StatsOrigin collect_shards(const Dump& dump, const CollectRequest& request, const PartsFolder& parts, bool resume,
                           Backend& backend, const SayProgress& say) {
  StatsOrigin origin;
  origin.header = header_of(dump, request.stats);
  if (request.tokens.count < dump.num_tokens()) origin.header.range = request.tokens;
  origin.header.model.layers = request.layers;
  const auto tokens = static_cast<double>(request.tokens.count);
  double done = 0.0;
  const bool overlaps = backend.leaves_processors_free();
  LayerReader reader(dump, request, overlaps);
  std::future<std::string> saved;  // of the layer before
  const auto take_saved = [&] {
    if (saved.valid()) origin.entries.back().file_hash = saved.get();
  };
  for (std::size_t i = 0; i < request.layers.size(); ++i) {
    const LayerEntry& entry = request.layers[i];
    const StatsRequest layer_request = restrict_to_layer(request.stats, entry);
    const double work = work_of_layer(request, entry);
    /// @param part  of the layer that is done, 0..1
    const auto say_part = [&](double part) {
      if (say) say({done + part * work, i, entry.layer, (static_cast<double>(i) + part) * tokens});
    };
    const LayerActivations activations = reader.load(i);
    const fs::path path = parts.part(origin.header, layer_request, activations);
    std::shared_ptr<const LayerStats> last;
    std::string hash = resume ? hash_of_old_shard(path, activations, origin.header, layer_request) : std::string();
    if (hash.empty()) {
      auto stats = std::make_shared<const LayerStats>(
          collect(activations, layer_request, backend, [&](std::int64_t rows, std::int64_t all) {
            say_part(static_cast<double>(rows) / static_cast<double>(all));
          }));
      take_saved();
      saved = std::async(overlaps ? std::launch::async : std::launch::deferred, [&header = origin.header, stats, path] {
        return save_stats(header, std::span(stats.get(), 1), path);
      });
      if (!overlaps) hash = saved.get();
      if (i + 1 == request.layers.size())
        last = std::move(stats);  // keeps the last layer in memory, which holds one layer anyway
    } else {
      take_saved();
    }
    say_part(1.0);
    done += work;
    const auto sequences = static_cast<std::int64_t>(activations.cu_seqlens.size()) - 1;
    origin.entries.push_back(
        {path, 0, activations.k.tokens, sequences, activations.content_hash, {}, std::move(last), std::move(hash)});
  }
  take_saved();
  return origin;
}

}  // namespace kvq
