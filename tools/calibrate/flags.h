#pragma once

#include "common/cli.h"
#include "common/tool_text.h"

#include <kvq/methods/option_table.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace kvq {

/// The files that kvq-calibrate reads, and which part of them. An empty text takes the default.
struct Inputs {
  std::vector<std::string> dumps, merge_stats;
  std::string stats;  ///< with a dump: written; without: read
  std::string layers;
  std::string geometry;  ///< in place of a dump for --dry-run, see input_of_geometry()
  std::int64_t first_token = 0;
  std::optional<std::int64_t> num_tokens;
};

/// What kvq-calibrate writes and prints.
struct Outputs {
  std::string artifact;
  std::int64_t context = 32768;
  bool json = false, quiet = false, report_rotations = false, report_ablation = false, report_outliers = false;
};

/// How kvq-calibrate runs, and what its statistics keep.
struct Behavior {
  int threads = 0;
  std::string device = "auto";  ///< see parse_device()
  std::string mem_limit;        ///< of each GPU, see parse_byte_size()
  std::string predict_for;      ///< see parse_machine()
  bool resume = false, dry_run = false, stats_only = false;
  std::int64_t sample_tokens = 2048, golden_tokens = 32;
  std::optional<std::int64_t> held_out_tokens;  ///< empty: kHeldOutTokens if the method spends a budget, else none
  std::vector<std::string> collect;
  std::optional<std::string> queries;  ///< empty: all
};
inline constexpr std::int64_t kHeldOutTokens = 1024;

/// A parsed command line or recipe. Only tools/ sees one: the library gets Options and values of the other structs.
struct CalibrateFlags {
  std::string method = Options{}.method;
  GivenOptions given;  ///< options of the library's table
  Inputs inputs;
  Outputs outputs;
  Behavior behavior;
};

/// What kvq-calibrate says of itself beside its flags.
ToolText calibrate_text();

/// Binds `app` to `flags`, which must outlive the parsing. Flags of options come from option_table().
void add_flags(CLI::App& app, CalibrateFlags& flags);

/// The method's defaults, overridden by the flags. Refuses files that are both input and output. @throws Error{usage}
Options resolve_options(const CalibrateFlags& flags);

/// Whether a flag names a file to write, a report, or how the process runs: all that a row of a sweep cannot have.
bool concerns_process(const CalibrateFlags& flags);

/// The file that a run is about: with --stats-only the statistics, else --output if given, else
/// `<dump stem>.<method>.safetensors` beside the first dump.
std::filesystem::path resolve_output(const CalibrateFlags& flags);

}  // namespace kvq
