#include "calibrate/outputs.h"

#include "common/say.h"
#include "common/table.h"

#include <kvq/container/output_target.h>
#include <kvq/core/error.h>

#include <fmt/format.h>

#include <sys/stat.h>
#include <unistd.h>

#include <exception>
#include <new>
#include <system_error>

namespace kvq {

namespace fs = std::filesystem;

namespace {

bool writes_stats(const CalibrateFlags& flags) {
  const bool has_source = !flags.inputs.dumps.empty() || !flags.inputs.merge_stats.empty();
  return has_source && !flags.inputs.stats.empty();
}

bool on_one_disk(const fs::path& a, const fs::path& b) {
  struct stat first, second;
  return ::stat(a.c_str(), &first) == 0 && ::stat(b.c_str(), &second) == 0 && first.st_dev == second.st_dev;
}

void expect_space(const fs::path& folder, std::uintmax_t bytes, const char* what) {
  std::error_code failed;
  const fs::space_info space = fs::space(folder, failed);
  if (failed) return;
  const std::uintmax_t free = ::geteuid() == 0 ? space.free : space.available;
  if (free < bytes)
    throw Error{ErrorKind::io,
                fmt::format("{}: disk too small: {} need at least {}, {} are free", folder.string(), what,
                            format_bytes(static_cast<double>(bytes)), format_bytes(static_cast<double>(free))),
                "free some space, or name an --output on another disk"};
}

std::string advice(const PartsFolder& parts, std::string hint) {
  if (!hint.empty()) hint += "; ";
  return fmt::format("{}{} has what was collected; with --resume the next run takes it over", hint,
                     parts.path().string());
}

}  // namespace

void check_outputs(const CalibrateFlags& flags, const fs::path& artifact) {
  output_target(artifact);
  if (writes_stats(flags)) output_target(flags.inputs.stats);
}

std::optional<OutputClaim> claim_stats(const CalibrateFlags& flags) {
  if (!writes_stats(flags)) return std::nullopt;
  return OutputClaim::of_file(flags.inputs.stats, "kvq-calibrate");
}

void check_disk_space(const CollectRequest& request, const PartsFolder& parts, const fs::path& stats) {
  const std::uintmax_t all = least_bytes(request), there = parts.num_bytes();
  std::uintmax_t missing = all > there ? all - there : 0;
  if (!stats.empty() && on_one_disk(folder_of(stats), parts.path()))
    missing += all;
  else if (!stats.empty())
    expect_space(folder_of(stats), all, "statistics");
  expect_space(folder_of(parts.path()), missing, "statistics of the layers");
}

RemoveParts::~RemoveParts() {
  if (parts_.remove() || quiet_) return;
  say(fmt::format("note: {} stays, because it has files that kvq-calibrate did not write\n", parts_.path().string()));
}

void rethrow_with_parts(const PartsFolder& parts) {
  parts.remove_if_empty();
  const bool has_parts = parts.num_parts() > 0;
  try {
    throw;
  } catch (const Error& error) {
    if (!has_parts) throw;
    throw Error{error.kind(), error.what(), advice(parts, error.hint())};
  } catch (const std::bad_alloc&) {
    if (!has_parts) throw;
    throw Error{ErrorKind::io, "out of memory", advice(parts, "fewer --threads need less")};
  }
}

}  // namespace kvq
