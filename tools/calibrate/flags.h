#pragma once

#include "common/cli.h"

#include <kvq/methods/method.h>

#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace kvq {

/// The flags of kvq-calibrate as typed. An empty field takes the method's default.
struct CalibrateFlags {
  std::vector<std::string> dumps;
  std::string method = "oscar";
  std::string output, stats;
  std::vector<std::string> merge_stats;
  std::string layers, exact_layers;
  std::optional<double> bits, bits_k, bits_v, budget_bits, budget_bytes;
  std::optional<int> group_size, kmeans, kmeans_k, kmeans_v, kmeans_restarts, min_bits, max_bits, memory, row_bytes_k,
      row_bytes_v, sink_tokens, recent_tokens, hadamard_order, sign_search;
  std::optional<std::string> coder, scale_rule, scale_type, zero, clip, clip_k, clip_v, center, share, composition,
      target_k, target_v, hadamard, coder_k, coder_v, codebook, hessian, kmeans_scope, kmeans_order, score, mixing,
      k_allocation, v_allocation, transform, transform_k, transform_v;
  std::vector<std::string> collect;
  std::set<std::string> given;  ///< names of the flags that were typed, see given_flags()
  bool uniform_layout = false, budget_per_layer = false, joint = false, random_signs = false, resume = false,
       dry_run = false, json = false, quiet = false, report_rotations = false, report_ablation = false,
       report_outliers = false;
  int threads = 0;
  std::int64_t seed = 0, first_token = 0;
  std::optional<std::int64_t> num_tokens;
  std::int64_t sample_tokens = 2048, context = 32768, held_out_tokens = 1024, golden_tokens = 32;
};

void add_flags(CLI::App& app, CalibrateFlags& flags);

/// Long names of the flags that a parsed command line or recipe gives.
std::set<std::string> given_flags(const CLI::App& app);

/// The method's defaults, overridden by the flags. @throws Error{usage}
Options resolve_options(const CalibrateFlags& flags);

/// --output if given, else `<dump stem>.kvq.safetensors` beside the first dump.
std::filesystem::path resolve_output(const CalibrateFlags& flags);

}  // namespace kvq
