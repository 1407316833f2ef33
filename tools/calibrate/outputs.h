#pragma once

#include "calibrate/flags.h"

#include <kvq/container/output_claim.h>
#include <kvq/stats/parts_folder.h>
#include <kvq/stats/shards.h>

#include <filesystem>
#include <optional>

namespace kvq {

/// Checks the outputs of a run as claiming them would, and claims nothing: for --dry-run.
/// @param artifact  see resolve_output() @throws the errors of output_target()
void check_outputs(const CalibrateFlags& flags, const std::filesystem::path& artifact);

/// Claims --stats, if this run writes it. @throws the errors of OutputClaim::of_file()
std::optional<OutputClaim> claim_stats(const CalibrateFlags& flags);

/// Checks that the disk can hold what a run collects: the parts, and the file of --stats.
/// @param stats  the file of --stats; empty without it
/// @throws Error{io} if it is clearly too small
void check_disk_space(const CollectRequest& request, const PartsFolder& parts, const std::filesystem::path& stats);

/// Removes the parts of a run at the end of its scope, after the run's artifact is written.
class RemoveParts {
 public:
  RemoveParts(const PartsFolder& parts, bool quiet) : parts_(parts), quiet_(quiet) {}
  ~RemoveParts();
  RemoveParts(const RemoveParts&) = delete;
  RemoveParts& operator=(const RemoveParts&) = delete;

 private:
  const PartsFolder& parts_;
  bool quiet_;
};

/// Throws the current error again, with a hint that says how to go on with the parts that are collected.
[[noreturn]] void rethrow_with_parts(const PartsFolder& parts);

}  // namespace kvq
