#pragma once

#include <kvq/container/json.h>
#include <kvq/eval/evaluate.h>
#include <kvq/plan/allocation_stats.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace kvq {

/// A grid of calibrations (formats/eval.md, "Sweeps").
struct Sweep {
  struct Row {
    std::string name, flags;  ///< flags for kvq-calibrate
    std::string dump = {};    ///< dump to calibrate on, in addition to those in `flags`
  };
  std::string title;
  std::vector<Row> rows;
  std::vector<std::string> schemes;
  std::vector<Metric> metrics;  ///< columns of the table, the first of which makes the front; empty: the usual ones
};

/// @param calibrations  [NAME=]DUMP of each dump to calibrate on; several dumps form one more axis. NAME ends at the
///                      first = and has no slash. A text that names an existing file is a FILE, even with = in it
/// @throws Error{io, bad_input, usage} with the file and what it expected
Sweep load_sweep(const std::filesystem::path& path, const std::vector<std::string>& calibrations);

/// Checks all rows and schemes before any calibration: flags, names, dumps, tokens and layers must exist, and the
/// calibration model must be the model to measure on. Opens all dumps.
/// @param model, layers  those to measure on
/// @throws Error that names the row
void check_sweep(const Sweep& sweep, const ModelGeometry& model, const std::vector<int>& layers);

struct SweepFolders {
  std::filesystem::path artifacts;   ///< one artifact for each row
  std::filesystem::path statistics;  ///< statistics, deleted afterwards
  bool artifacts_stay = false;
};

/// Calibrates all rows. Rows that need the same moments of the same tokens share one collection.
/// @return  candidates with paths but no artifact loaded, then the schemes; equal names get numbers
std::vector<Candidate> calibrate_sweep(const Sweep& sweep, const SweepFolders& folders, int threads, bool quiet);

/// The row's flags as on a command line, with its dump.
std::string typed_flags(const Sweep::Row& row);

/// Distances of the key widths from those of the first row; none where either row has no RoPE-block widths.
std::vector<std::optional<AllocationDistance>> sweep_distances(const Sweep& sweep,
                                                               const std::vector<Candidate>& candidates);

/// A line for each row: bits, errors, whether the row is on the Pareto front of the first metric (output error if the
/// sweep names none) against effective bits, and, for mixed widths, the distance from the first row's widths.
std::string sweep_table(const Sweep& sweep, const std::vector<Candidate>& candidates,
                        const std::vector<CandidateResult>& results);
/// Adds `title`, and `flags`, `pareto` and `allocation` to each scheme.
void add_sweep(const Sweep& sweep, const std::vector<Candidate>& candidates,
               const std::vector<CandidateResult>& results, Json& document);

}  // namespace kvq
