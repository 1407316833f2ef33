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

/// Where a decision reads from: the shards of a run, or a statistics file.
class StatsOrigin : public StatsSource {
 public:
  struct Entry {
    std::filesystem::path path;  ///< of the shard or the statistics file
    std::size_t index;           ///< into that file
    std::int64_t tokens, sequences;
    std::string content_hash;
    std::shared_ptr<const StatsFile> file;    ///< if it is open already
    std::shared_ptr<const LayerStats> stats;  ///< if they are in memory already
  };
  std::size_t size() const override { return entries.size(); }
  std::shared_ptr<const LayerStats> load(std::size_t index) const override;

  std::vector<Entry> entries;
  StatsHeader header;
};

/// Layers of a dump or statistics file that `--layers` names; all if it is empty. @throws Error{usage} for one that is
/// not there
std::vector<LayerEntry> choose_layers(const ModelGeometry& model, const std::vector<int>& wanted);

/// Collects each layer into `<folder>/layer-NNNN.safetensors`, one at a time, atomically. With `resume`, a shard that
/// holds what this run would collect (same dump data by hash, seed, sample and moments) is kept; anything else is
/// collected anew.
/// @return  shards in layer order
StatsOrigin collect_shards(const Dump& dump, const std::vector<LayerEntry>& layers, const StatsRequest& request,
                           const TokenRange& tokens, const std::filesystem::path& folder, bool resume, bool quiet);

/// Layers of a statistics file.
StatsOrigin open_stats(const std::filesystem::path& path, const std::vector<int>& wanted);

/// What the dump says about itself, for statistics and artifact.
StatsHeader header_of(const Dump& dump, const StatsRequest& request);

/// Moments a layer without values can have.
StatsRequest restrict_to_layer(StatsRequest request, const LayerEntry& layer);

}  // namespace kvq
