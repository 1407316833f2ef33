#pragma once

#include <kvq/stats/collect.h>
#include <kvq/stats/stats_file.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace kvq {

/// The folder in which a run keeps the statistics of each collected layer (a part), until its output is written. A
/// file in it, `kvq-parts.txt`, says that kvq made the folder. Only files that kvq has named are ever removed. The
/// folder must belong to one run at a time: the caller has an OutputClaim.
class PartsFolder {
 public:
  /// Makes the folder, or takes over one that kvq made, with its parts.
  /// @throws Error{bad_input} if `path` is something else; Error{io} if it cannot be made
  explicit PartsFolder(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }

  /// Number and bytes of the parts, of this and of earlier runs.
  std::size_t num_parts() const;
  std::uintmax_t num_bytes() const;

  /// Where the part of a layer lies. The name has a hash of all that its content depends on: kvq's version, the
  /// header, the request and the dump's data of the layer.
  std::filesystem::path part(const StatsHeader& header, const StatsRequest& request,
                             const LayerActivations& layer) const;

  /// Removes all parts, also those of earlier runs, then the folder if nothing else is in it.
  /// @return  whether the folder is gone; it stays if it has files of others
  bool remove() const;
  /// remove(), if the folder has no part.
  void remove_if_empty() const;

 private:
  std::vector<std::filesystem::path> own_files() const;

  std::filesystem::path path_;
};

}  // namespace kvq
