#pragma once

#include <kvq/stats/stats_file.h>
#include <kvq/stats/stats_source.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
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
    std::string file_hash = {};               ///< of a part: the StatsFile::file_hash() that this run knows; or empty
  };
  std::size_t size() const override { return entries.size(); }
  std::shared_ptr<const LayerStats> load(std::size_t index) const override;

  std::vector<Entry> entries;  ///< ascending layers
  StatsHeader header;          ///< its model has the layers of `entries`
};

/// Writes the statistics of all entries, which are parts of a run, to one file.
/// @throws Error{bad_input} if a part is not the one that this run knows; the errors of merge_stats_files()
void merge_parts(const StatsOrigin& origin, const std::filesystem::path& output);

/// The layers of a dump or statistics file that `wanted` names; all layers if `wanted` is empty.
/// @param wanted  ascending
/// @throws Error{usage} for a layer that the file does not have
std::vector<LayerEntry> choose_layers(const ModelGeometry& model, const std::vector<int>& wanted);

/// Opens a statistics file; `wanted` as in choose_layers(). @throws Error{io, bad_input, unsupported, usage}
StatsOrigin open_stats(const std::filesystem::path& path, const std::vector<int>& wanted);

}  // namespace kvq
