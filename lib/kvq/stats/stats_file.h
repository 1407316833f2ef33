#pragma once

#include <kvq/core/geometry.h>
#include <kvq/stats/layer_stats.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kvq {

class SafetensorsWriter;

/// What a statistics file says about its origin.
struct StatsHeader {
  ModelGeometry model;  ///< with `layers`
  std::string producer;
  std::string capture_point;
  std::uint64_t seed = 0;
  std::int64_t sample_tokens = 0;
  std::optional<TokenRange> range = {};  ///< of the dump's tokens, where a part of them was taken
};

/// A statistics file (formats/stats.md), opened for reading; a layer is read when it is asked for.
class StatsFile {
 public:
  /// @throws Error{io, bad_input, unsupported}
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
  std::int64_t tokens(std::size_t index) const;
  std::int64_t sequences(std::size_t index) const;

 private:
  friend void merge_stats_files(const std::vector<std::filesystem::path>&, const std::filesystem::path&);
  /// Adds views of one layer's tensors, for which this file must stay open.
  void add_to(SafetensorsWriter& writer, std::size_t index) const;

  struct Impl;
  explicit StatsFile(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Writes statistics atomically; header.model.layers is taken from the layers.
void save_stats(const StatsHeader& header, std::span<const LayerStats> layers, const std::filesystem::path& path);

/// Joins statistics files: layers that appear once are taken as they are, layers of several files are merged in the
/// order of the files; the range of tokens is kept if all have the same and no layer is merged. One layer at a time is
/// in memory. @throws Error{bad_input} if models, seeds, sample sizes or moments differ or layers saw different numbers
/// of sequences
void merge_stats_files(const std::vector<std::filesystem::path>& inputs, const std::filesystem::path& output);

}  // namespace kvq
