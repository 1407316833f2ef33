#pragma once

#include <kvq/core/geometry.h>
#include <kvq/stats/layer_stats.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kvq {

class SafetensorsWriter;
struct StatsPromise;
using SayWarning = std::function<void(const std::string&)>;

/// What a statistics file says about its origin.
struct StatsHeader {
  ModelGeometry model;  ///< with `layers`
  std::string producer;
  std::string capture_point;
  std::uint64_t seed = 0;
  std::int64_t sample_tokens = 0;
  Queries queries = Queries::all;        ///< whose queries count in the moments
  std::optional<TokenRange> range = {};  ///< the dump's tokens that were used, if not all
};

/// A statistics file (formats/stats.md), opened for reading. load() reads one layer.
class StatsFile {
 public:
  /// Reads everything once: a file that opens is undamaged, and every layer agrees with itself (check_stats()).
  /// @throws Error{io, bad_input, numerical, unsupported}
  static StatsFile open(const std::filesystem::path& path);
  StatsFile(StatsFile&&) noexcept;
  StatsFile& operator=(StatsFile&&) noexcept;
  ~StatsFile();

  const StatsHeader& header() const;
  const std::string& name() const;
  /// @param index  into header().model.layers
  LayerStats load(std::size_t index) const;
  /// XXH3-128 of the layer's dump data, without reading the layer.
  const std::string& content_hash(std::size_t index) const;
  /// The hash of everything in this file (formats/stats.md), which open() has checked.
  const std::string& file_hash() const;
  /// Whose tokens a layer's are; empty if the file does not say (before 1.5).
  const std::vector<DumpRange>& ranges(std::size_t index) const;
  std::vector<std::int64_t> sample_keys(std::size_t index) const;  ///< ascending
  std::int64_t tokens(std::size_t index) const;
  std::int64_t sequences(std::size_t index) const;

 private:
  friend void merge_open_files(const std::vector<StatsFile>&, const std::filesystem::path&, const SayWarning&);
  void check(const StatsPromise& promise) const;
  /// Adds views of one layer's tensors, for which this file must stay open.
  void add_to(SafetensorsWriter& writer, std::size_t index) const;

  struct Impl;
  explicit StatsFile(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Writes statistics atomically; header.model.layers is taken from the layers.
/// @return  StatsFile::file_hash() of the new file
std::string save_stats(const StatsHeader& header, std::span<const LayerStats> layers,
                       const std::filesystem::path& path);

/// Joins statistics files. A layer of one file is copied; a layer of several files is merged in the order of the files.
/// The range of tokens is kept if all files have the same range and no layer is merged. Only one layer at a time is in
/// memory. @throws Error{bad_input} if models, seeds, sample sizes, choices of queries, moments or the layers' numbers
/// of sequences differ, or if a token is in two files
/// @param warn  called with a line if files before version 1.5 do not say enough to find every such token
void merge_stats_files(const std::vector<std::filesystem::path>& inputs, const std::filesystem::path& output,
                       const SayWarning& warn = {});
/// merge_stats_files() of files that are open. @param files  at least one
void merge_open_files(const std::vector<StatsFile>& files, const std::filesystem::path& output,
                      const SayWarning& warn = {});

}  // namespace kvq
