#pragma once

#include "eval/results.h"

#include <filesystem>
#include <string>
#include <vector>

namespace kvq {

/// A grid of calibrations (formats/eval.md, "Sweeps").
struct Sweep {
  struct Row {
    std::string name, flags;  ///< flags as typed to kvq-calibrate
    std::string dump = {};    ///< to calibrate on, beside those of the flags
  };
  std::string title;
  std::vector<Row> rows;
  std::vector<std::string> schemes;
};

/// @param calibrations  [NAME=]DUMP of each dump to calibrate on; several are one more axis. A name
///                      ends at the first = and has no slash; what names a file is a file, whatever it holds
/// @throws Error{io, bad_input, usage} naming the file and what it expected
Sweep load_sweep(const std::filesystem::path& path, const std::vector<std::string>& calibrations);

/// What can be wrong with rows and schemes before anything is calibrated: flags, names, dumps, tokens and layers that
/// are not there, another model than the one to measure on. Opens all dumps.
/// @param model, layers  to measure on
/// @throws Error naming the row
void check_sweep(const Sweep& sweep, const ModelGeometry& model, const std::vector<int>& layers);

struct SweepFolders {
  std::filesystem::path artifacts;   ///< one for each row
  std::filesystem::path statistics;  ///< goes away
  bool artifacts_stay = false;
};

/// Calibrates all rows, collecting statistics once for rows that ask for the same moments of the same tokens.
/// @return  candidates by path, with no artifact loaded, then the schemes; equal names are numbered
std::vector<Candidate> calibrate_sweep(const Sweep& sweep, const SweepFolders& folders, int threads, bool quiet);

/// One line a row: bits, errors, whether it is on the front of output error against effective bits, and for mixed
/// widths how far they are from the first row's.
std::string sweep_table(const Sweep& sweep, const std::vector<Candidate>& candidates,
                        const std::vector<CandidateResult>& results);
/// Adds `title`, and to each scheme `flags`, `pareto` and `allocation`.
void add_sweep(const Sweep& sweep, const std::vector<Candidate>& candidates,
               const std::vector<CandidateResult>& results, Json& document);

}  // namespace kvq
