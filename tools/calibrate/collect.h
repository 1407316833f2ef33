#pragma once

#include "common/progress.h"

#include <kvq/dump/dump_file.h>
#include <kvq/methods/method.h>
#include <kvq/stats/collect.h>
#include <kvq/stats/held_out.h>
#include <kvq/stats/stats_file.h>

#include <filesystem>
#include <memory>
#include <vector>

namespace kvq {

/// Source of statistics for a decision: the shards of a run, or one statistics file.
class StatsOrigin : public StatsSource {
 public:
  struct Entry {
    std::filesystem::path path;  ///< shard or statistics file
    std::size_t index;           ///< of the layer in that file
    std::int64_t tokens, sequences;
    std::string content_hash;
    std::shared_ptr<const StatsFile> file;    ///< set if the file is open already
    std::shared_ptr<const LayerStats> stats;  ///< set if the statistics are in memory already
  };
  std::size_t size() const override { return entries.size(); }
  std::shared_ptr<const LayerStats> load(std::size_t index) const override;

  std::vector<Entry> entries;
  StatsHeader header;
};

/// The layers of a dump or statistics file that `--layers` names; all layers if `wanted` is empty.
/// @throws Error{usage} for a layer that the file does not have
std::vector<LayerEntry> choose_layers(const ModelGeometry& model, const std::vector<int>& wanted);

/// Collects the statistics of each layer into `<folder>/layer-NNNN.safetensors`, one layer at a time, atomically. With
/// `resume`, collect_shards() keeps a shard whose dump hash, seed, sample and moments equal those of this run, and
/// collects all other layers again.
/// @return  shards in layer order
StatsOrigin collect_shards(const Dump& dump, const std::vector<LayerEntry>& layers, const StatsRequest& request,
                           const TokenRange& tokens, const std::filesystem::path& folder, bool resume, bool quiet);

/// Opens a statistics file; `wanted` as in choose_layers().
StatsOrigin open_stats(const std::filesystem::path& path, const std::vector<int>& wanted);

/// The header of statistics and artifact: facts of the dump, and seed and sample of the request.
StatsHeader header_of(const Dump& dump, const StatsRequest& request);

/// Removes the moments of values from the request if the layer has no values.
StatsRequest restrict_to_layer(StatsRequest request, const LayerEntry& layer);

}  // namespace kvq
