#pragma once

#include <kvq/dump/dump_file.h>
#include <kvq/stats/collect.h>
#include <kvq/stats/held_out.h>
#include <kvq/stats/parts_folder.h>
#include <kvq/stats/stats_origin.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <vector>

/// Collecting a whole dump: layer by layer, each into a file of its own (a shard), so that an interrupted run can go
/// on.
namespace kvq {

/// What a run collects from a dump.
struct CollectRequest {
  std::vector<LayerEntry> layers;  ///< see choose_layers()
  StatsRequest stats;
  TokenRange tokens;  ///< see choose_tokens()
};

/// How far a run is. `done` is in the unit of collect_work().
struct CollectProgress {
  double done = 0.0;
  std::size_t index = 0;  ///< in CollectRequest::layers, of the lowest layer that is not done
  int layer = 0;
  double tokens = 0.0;  ///< over all layers
};
/// Called from any thread, by one at a time.
using SayProgress = std::function<void(const CollectProgress&)>;

/// Tokens [first, first + count) of a dump of `tokens` tokens; without `count` all from `first` on.
/// @throws Error{usage} if the dump does not have them
TokenRange choose_tokens(std::int64_t tokens, std::int64_t first, std::optional<std::int64_t> count);

/// Floating-point operations of collect_shards(), as for one sequence.
double collect_work(const CollectRequest& request);

/// Bytes that the files of collect_shards() have at the least: moments, and the sample as 16-bit numbers.
std::uintmax_t least_bytes(const CollectRequest& request);

/// Collects the statistics of each layer into PartsFolder::part(), atomically: one layer at a time, or, if the backend
/// leaves processors free, two to six at a time, at most 2 GiB of a dump's numbers if two layers are not more. With
/// `resume`, collect_shards() keeps a shard whose kvq version, dump hash, seed, sample and moments equal those of this
/// run, and collects all other layers again. Shards of other runs stay as they are.
/// @return  shards in layer order, with the hashes that load() expects; the last layer's statistics stay in memory if
///          they were collected
/// @throws  errors of Dump::load_layer(), collect() and save_stats(), of the lowest layer that has one; the shards of
///          all lower layers are there then, and maybe some of higher ones
StatsOrigin collect_shards(const Dump& dump, const CollectRequest& request, const PartsFolder& parts, bool resume,
                           Backend& backend = cpu_backend(), const SayProgress& say = {});

/// The header of statistics and artifact: facts of the dump, and seed and sample of the request.
StatsHeader header_of(const Dump& dump, const StatsRequest& request);

/// Removes the moments of values from the request if the layer has no values.
StatsRequest restrict_to_layer(StatsRequest request, const LayerEntry& layer);

}  // namespace kvq
