#include "calibrate/flags.h"

#include "common/version.h"

#include <kvq/core/error.h>
#include <kvq/methods/allocated_plan.h>
#include <kvq/plan/golden_rows.h>
#include <kvq/solve/spectral.h>

#include <fmt/format.h>

#include <algorithm>
#include <system_error>
#include <tuple>

namespace kvq {

namespace {

std::string method_list() {
  std::string text;
  for (const Method& row : methods()) text += fmt::format("\n  {:<10} {}", row.name, row.summary);
  return text;
}

std::string composition_list() {
  std::string text;
  for (const Composition& row : compositions()) {
    const std::string official = row.official.empty() ? "" : fmt::format(" [{}]", row.official);
    text += fmt::format("\n  {:<18} {:<10} {}{}", row.name, row.recipe, row.summary, official);
  }
  return text;
}

constexpr const char* kTransforms =
    "\n\nTransforms (keys k A and queries q A^-T give the same logits; which A has the smallest error?):\n"
    "  orthogonal  A rotates: what the model's scaling gave a channel, it keeps or spreads\n"
    "  diagonal    a scale a channel before the rotation, cheap beside fast Hadamards; undoes outliers\n"
    "  balanced    rows and the metric of their errors become alike: the smallest error of one width\n"
    "  klt         the same coordinates with widths by channel: block-gtq and kvq\n"
    "  Their outlier gain, squared error of orthogonal over that of balanced rows, is in the closing table.";

template <typename Enum, std::size_t N>
Enum pick(const char* flag, const std::string& word, const Enum (&values)[N]) {
  std::string words;
  for (const Enum value : values) {
    if (word == to_string(value)) return value;
    words += fmt::format("{}{}", words.empty() ? "" : ", ", to_string(value));
  }
  throw Error{ErrorKind::usage, fmt::format("{}: unknown \"{}\"", flag, word), "choose one of " + words};
}

void apply_coder(const CalibrateFlags& flags, const std::optional<std::string>& own, const char* own_flag,
                 SideOptions& side) {
  const auto kind = [](const char* flag, const std::string& word) {
    return pick(flag, word, {CoderKind::affine, CoderKind::symmetric, CoderKind::codebook, CoderKind::trellis});
  };
  const CoderKind before = side.coder;
  if (flags.coder) side.coder = kind("--coder", *flags.coder);
  if (flags.codebook) {
    if (flags.coder && side.coder != CoderKind::codebook)
      throw Error{ErrorKind::usage, "--codebook needs --coder codebook, which it implies"};
    if (*flags.codebook != "lloyd-max" && *flags.codebook != "fitted")
      throw Error{ErrorKind::usage,
                  fmt::format("--codebook: expected lloyd-max or fitted, found \"{}\"", *flags.codebook)};
    side.coder = CoderKind::codebook;
    side.fitted = *flags.codebook == "fitted";
  }
  if (own) side.coder = kind(own_flag, *own);
  if (side.coder != before) {
    side.rule = side.coder == CoderKind::affine ? ScaleRule::minmax : ScaleRule::norm;
    if (side.coder != CoderKind::affine) side.clip = 1.0;
  }
  if (flags.scale_rule)
    side.rule = pick("--scale-rule", *flags.scale_rule,
                     {ScaleRule::minmax, ScaleRule::absmax, ScaleRule::least_squares, ScaleRule::norm, ScaleRule::rms});
  if (flags.scale_type)
    side.scale_type = pick("--scale-type", *flags.scale_type, {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32});
  if (flags.zero) side.zero = pick("--zero", *flags.zero, {ZeroKind::floating, ZeroKind::integer});
  if (flags.group_size) side.group_size = *flags.group_size;
}

void apply_clip(const char* flag, const std::optional<std::string>& text, SideOptions& side) {
  if (!text) return;
  if (*text == "search") {
    side.clip = std::nullopt;
  } else if (*text == "none") {
    side.clip = 1.0;
  } else {
    double ratio = 0.0;
    if (!CLI::detail::lexical_cast(*text, ratio))
      throw Error{ErrorKind::usage, fmt::format("{}: expected search, none or a ratio, found \"{}\"", flag, *text)};
    side.clip = ratio;
  }
}

Moment pick_target(const char* flag, const std::string& word, std::initializer_list<Moment> allowed) {
  std::string words;
  for (const Moment moment : allowed) {
    if (word == to_string(moment)) return moment;
    words += fmt::format("{}{}", words.empty() ? "" : ", ", to_string(moment));
  }
  throw Error{ErrorKind::usage, fmt::format("{}: unknown \"{}\"", flag, word), "choose one of " + words};
}

void apply_sides(const std::string& flag, const std::string& word, bool& k, bool& v) {
  if (word != "none" && word != "k" && word != "v" && word != "kv")
    throw Error{ErrorKind::usage, fmt::format("{}: expected none, k, v or kv, found \"{}\"", flag, word)};
  k = word == "k" || word == "kv";
  v = word == "v" || word == "kv";
}

/// kvq's name of a composition, from kvq's name or from OSCAR's.
std::string pick_composition(const std::string& word) {
  if (const Composition* found = find_composition(word)) return found->name;
  std::vector<std::string> names;
  for (const Composition& row : compositions()) names.push_back(row.name);
  throw Error{ErrorKind::usage, fmt::format("--composition: unknown \"{}\"", word),
              fmt::format("choose one of {}", fmt::join(names, ", "))};
}

template <typename T>
void expect_range(const char* flag, const std::optional<T>& value, T lowest, T highest) {
  if (value && (*value < lowest || *value > highest))
    throw Error{ErrorKind::usage, fmt::format("{}: expected {} to {}, found {}", flag, lowest, highest, *value)};
}

void check_ranges(const CalibrateFlags& f) {
  constexpr int kMostTokens = 1073741823, kMostChannels = 1024;  // as in the schemas
  expect_range("--group-size", f.group_size, 0, kMostChannels);
  expect_range("--row-bytes-k", f.row_bytes_k, 4, 4096);
  expect_range("--row-bytes-v", f.row_bytes_v, 4, 4096);
  for (const auto& [flag, value] :
       {std::pair{"--kmeans", f.kmeans}, {"--kmeans-k", f.kmeans_k}, {"--kmeans-v", f.kmeans_v}})
    expect_range(flag, value, 1, 4096);
  for (const auto& [flag, value] : {std::pair{"--budget-bits", f.budget_bits}})
    if (value && !(*value >= 1.0 && *value <= 8.0))
      throw Error{ErrorKind::usage, fmt::format("{}: expected 1 to 8, found {}", flag, *value)};
  if (f.budget_bytes && !(*f.budget_bytes > 0.0))
    throw Error{ErrorKind::usage, fmt::format("--budget-bytes: expected more than 0, found {}", *f.budget_bytes)};
  expect_range("--sink-tokens", f.sink_tokens, 0, kMostTokens);
  expect_range("--recent-tokens", f.recent_tokens, 0, kMostTokens);
  expect_range<std::int64_t>("--seed", f.seed, 0, INT64_MAX);
}

/// Refuses an output file that is also an input, because writing it would destroy the input.
void refuse_overwriting(const CalibrateFlags& f) {
  namespace fs = std::filesystem;
  const auto same = [](const fs::path& a, const fs::path& b) {
    std::error_code unknown;
    return fs::equivalent(a, b, unknown) || fs::weakly_canonical(a, unknown) == fs::weakly_canonical(b, unknown);
  };
  const auto refuse = [](const char* flag, const std::string& file, const char* what) {
    throw Error{ErrorKind::usage, fmt::format("{}: {} is {}", flag, file, what), "choose another name"};
  };
  for (const std::string& dump : f.dumps) {
    if (!f.output.empty() && same(f.output, dump)) refuse("--output", f.output, "the dump itself");
    if (!f.stats.empty() && same(f.stats, dump)) refuse("--stats", f.stats, "the dump itself");
  }
  if (f.output.empty() || f.stats.empty() || !same(f.output, f.stats)) return;
  refuse("--output", f.output, f.dumps.empty() ? "the file that --stats reads" : "the file that --stats writes");
}

void refuse_without_dump(const CalibrateFlags& f) {
  if (f.dumps.empty() && (f.num_tokens || f.first_token > 0))
    throw Error{ErrorKind::usage, "--first-token and --num-tokens choose tokens of a dump: --model is needed"};
}

/// Refuses flags that do not apply to the method, because a result does not show that a flag was ignored.
void refuse_foreign_flags(const CalibrateFlags& f) {
  struct Rule {
    const char* flag;
    bool given;
    std::vector<std::string> methods;
  };
  const Rule rules[] = {{"--composition", f.composition.has_value(), {"oscar"}},
                        {"--target-k", f.target_k.has_value(), {"oscar"}},
                        {"--target-v", f.target_v.has_value(), {"oscar"}},
                        {"--sign-search", f.sign_search.has_value(), {"oscar"}},
                        {"--hadamard-order", f.hadamard_order.has_value(), {"saw-int4"}},
                        {"--hadamard", f.hadamard.has_value(), {"saw-int4"}},
                        {"--random-signs", f.random_signs, {"saw-int4", "quarot"}},
                        {"--hessian", f.hessian.has_value(), {"saw-int4"}},
                        {"--score", f.score.has_value(), {"block-gtq", "kvq"}},
                        {"--min-bits", f.min_bits.has_value(), {"block-gtq", "kvq"}},
                        {"--max-bits", f.max_bits.has_value(), {"block-gtq", "kvq"}},
                        {"--mixing", f.mixing.has_value(), {"block-gtq", "tq-mse", "kvq"}},
                        {"--k-allocation", f.k_allocation.has_value(), {"block-gtq", "kvq"}},
                        {"--v-allocation", f.v_allocation.has_value(), {"block-gtq", "kvq"}},
                        {"--row-bytes-k", f.row_bytes_k.has_value(), {"block-gtq"}},
                        {"--row-bytes-v", f.row_bytes_v.has_value(), {"block-gtq"}},
                        {"--joint", f.joint, {"block-gtq"}},
                        {"--budget-bits", f.budget_bits.has_value(), {"block-gtq", "kvq"}},
                        {"--budget-bytes", f.budget_bytes.has_value(), {"block-gtq", "kvq"}},
                        {"--uniform-layout", f.uniform_layout, {"block-gtq", "kvq"}},
                        {"--budget-per-layer", f.budget_per_layer, {"block-gtq", "kvq"}}};
  for (const Rule& rule : rules)
    if (rule.given && std::find(rule.methods.begin(), rule.methods.end(), f.method) == rule.methods.end())
      throw Error{ErrorKind::usage, fmt::format("{} has no meaning for --method {}", rule.flag, f.method),
                  fmt::format("it belongs to {}", fmt::join(rule.methods, " and "))};
}

}  // namespace

void add_flags(CLI::App& app, CalibrateFlags& f) {
  app.description(
      "Reads dumped Q/K/V activations and writes a calibration artifact: per layer and KV head the rotations, clip "
      "ratios,\n"
      "centres and codes that a low-bit KV cache is stored with.\n\n"
      "  kvq-calibrate --model dump.h5                                  OSCAR, INT2, beside the dump\n"
      "  kvq-calibrate --model dump.h5 --method saw-int4 -o out.safetensors\n"
      "  kvq-calibrate --model dump.h5 --coder symmetric --center kv    norm-keeping codes, centred\n"
      "  kvq-calibrate --stats stats.safetensors --bits 3 -o out.safetensors   decide again, no dump");
  app.footer("Methods:" + method_list() +
             fmt::format("\n\nScores of a RoPE block: {}", fmt::join(score_names(), ", ")) + kTransforms +
             "\n\nCompositions (rows of activations meet the factors from left to right; [name in OSCAR's script]):" +
             composition_list());
  app.set_config("--config", "", "read flags from an INI or TOML file");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.set_version_flag("--version", version_line("kvq-calibrate"));

  const std::string in = "Input and output";
  app.add_option("-m,--model", f.dumps, "dump file (formats/dump.md); may be given several times")->group(in);
  app.add_option("-o,--output", f.output, "artifact to write [<dump stem>.kvq.safetensors beside the dump]")->group(in);
  app.add_option("--stats", f.stats, "with --model: write the collected statistics here; without: decide from them")
      ->group(in);
  app.add_option("--merge-stats", f.merge_stats, "join statistics files into --stats FILE")->expected(1, -1)->group(in);
  app.add_option("--layers", f.layers, "only these layers, such as 0-3,7")->group(in);
  app.add_option("--first-token", f.first_token, "start at this token of the dump")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40))
      ->capture_default_str()
      ->group(in);
  app.add_option("--num-tokens", f.num_tokens, "use this many tokens [all that follow]")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
      ->group(in);
  app.add_flag("--resume", f.resume,
               "continue an interrupted run: layers already collected are taken from <output>.parts")
      ->group(in);
  app.add_flag("--dry-run", f.dry_run, "predict memory, time and artifact size, write nothing")->group(in);

  const std::string how = "How rows are stored";
  app.add_option("--method", f.method, "oscar, saw-int4, block-gtq, kvq, tq-mse, quarot, random or plain")
      ->capture_default_str()
      ->group(how);
  app.add_option("--bits", f.bits, "code bits: 1 to 8, 16 = exact; fractions where widths are allocated")->group(how);
  app.add_option("--bits-k", f.bits_k, "of keys")->group(how);
  app.add_option("--bits-v", f.bits_v, "of values")->group(how);
  app.add_option("--coder", f.coder, "affine (scale, minimum), symmetric (scale), codebook (Lloyd-Max) or trellis")
      ->group(how);
  app.add_option("--coder-k", f.coder_k, "of keys")->group(how);
  app.add_option("--coder-v", f.coder_v, "of values")->group(how);
  app.add_option("--codebook", f.codebook,
                 "lloyd-max (exact for the group) or fitted (to the sample); implies --coder codebook")
      ->group(how);
  app.add_option("--memory", f.memory,
                 "trellis: codes that a value looks back on, 1 to 3; more is better and slower [3]")
      ->group(how);
  app.add_option("--scale-rule", f.scale_rule,
                 "minmax (affine); norm, least_squares, absmax (symmetric), rms (codebook) [norm]")
      ->group(how);
  app.add_option("--scale-type", f.scale_type, "fp16, bf16 or fp32 [fp16]")->group(how);
  app.add_option("--zero", f.zero, "affine: float (minimum) or integer (zero point, SAW-INT4 Eq. 3-4) [float]")
      ->group(how);
  app.add_option("--group-size", f.group_size,
                 "channels that share a scale [64 for oscar where it divides head_dim, else head_dim]")
      ->group(how);
  app.add_option("--clip", f.clip, "clip ratio of both sides: search, none or a number [oscar: search]")->group(how);
  app.add_option("--clip-k", f.clip_k, "of keys; OSCAR serves 0.96")->group(how);
  app.add_option("--clip-v", f.clip_v, "of values; OSCAR serves 0.92")->group(how);
  app.add_option("--center", f.center, "subtract channel means: none, k, v or kv [none]")->group(how);
  app.add_option("--sink-tokens", f.sink_tokens, "first tokens that stay exact [oscar: 64]")->group(how);
  app.add_option("--recent-tokens", f.recent_tokens, "last tokens that stay exact [oscar: 256]")->group(how);
  app.add_option("--exact-layers", f.exact_layers, "layers to keep in 16 bit, such as 0,35")->group(how);
  app.add_option("--share", f.share, "kv_head (own rotation per head) or layer (average over heads) [kv_head]")
      ->group(how);

  const std::string map = "Transforms: coordinates that do not depend on how a model is scaled";
  app.add_option("--transform", f.transform,
                 "orthogonal (none), diagonal, balanced or klt, see below [orthogonal; kvq: chosen]")
      ->group(map);
  app.add_option("--transform-k", f.transform_k, "of keys")->group(map);
  app.add_option("--transform-v", f.transform_v, "of values")->group(map);

  const std::string rot = "Rotations";
  app.add_option("--composition", f.composition, "oscar: factors of the rotation, see below [uhp]")->group(rot);
  app.add_option("--target-k", f.target_k, "oscar: query (C_Q), scored_query (C_SQ) or key (K^T K) [query]")
      ->group(rot);
  app.add_option("--target-v", f.target_v,
                 "oscar: scored_value (exact C_S), sst (OSCAR's code) or value (V^T V) [scored_value]")
      ->group(rot);
  app.add_option("--sign-search", f.sign_search, "oscar: also try N random eigenvector signs a head [0]")->group(rot);
  app.add_option("--hadamard-order", f.hadamard_order,
                 "saw-int4: block size 16 to 256 [largest up to 128 that divides head_dim]")
      ->group(rot);
  app.add_option("--hadamard", f.hadamard, "saw-int4: rotate none, k, v or kv [k]")->group(rot);
  app.add_flag("--random-signs", f.random_signs, "saw-int4, quarot: random signs before the Hadamard")->group(rot);

  app.add_option("--hessian", f.hessian, "saw-int4: none, paper (A.3 as written) or consistent (rotated moment) [none]")
      ->group(rot);

  const std::string mix = "Mixed widths (block-gtq, kvq)";
  app.add_option("--score", f.score, "what a RoPE block is worth, see below [qk_avg; kvq: qk_energy_product]")
      ->group(mix);
  app.add_option("--k-allocation", f.k_allocation,
                 "widths of keys: none, rope_block or channel (query eigenbasis) [rope_block]")
      ->group(mix);
  app.add_option("--v-allocation", f.v_allocation,
                 "widths of values: none or channel (score-weighted eigenbasis) [none; kvq: channel]")
      ->group(mix);
  app.add_option("--min-bits", f.min_bits, "smallest width; 0 drops channels [1]")->group(mix);
  app.add_option("--max-bits", f.max_bits, "largest width [8]")->group(mix);
  app.add_option("--row-bytes-k", f.row_bytes_k,
                 "fill rows of this many bytes (codes, scales, padding) instead of --bits")
      ->group(mix);
  app.add_option("--row-bytes-v", f.row_bytes_v, "the same for values, with --v-allocation channel")->group(mix);
  app.add_option("--mixing", f.mixing, "rotation inside a group: haar, or hadamard where it fits [haar; kvq: hadamard]")
      ->group(mix);

  const std::string joint = "Budgets over layers and sides (kvq; block-gtq with --joint)";
  app.add_option("--budget-bits", f.budget_bits,
                 "average code bits of all layers and sides; scales are reported beside [kvq: 2]")
      ->group(joint);
  app.add_option("--budget-bytes", f.budget_bytes, "instead: bytes a token and layer, scales and padding included")
      ->group(joint);
  app.add_flag("--joint", f.joint, "block-gtq: spend one budget, decided by the measured error of attention's output")
      ->group(joint);
  app.add_flag("--uniform-layout", f.uniform_layout, "equal rows in all layers")->group(joint);
  app.add_flag("--budget-per-layer", f.budget_per_layer,
               "every layer spends the same budget, its keys and values share it")
      ->group(joint);
  app.add_option("--held-out-tokens", f.held_out_tokens, "tokens kept out of all statistics, to compare plans on")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 20))
      ->capture_default_str()
      ->group(joint);
  app.add_flag("--report-ablation", f.report_ablation, "kvq: also print what each ingredient brings at this budget")
      ->group(joint);

  const std::string km = "K-means residual codes (any method)";
  app.add_option("--kmeans", f.kmeans, "code residuals of C centroids, 1 to 4096, keys and values; 1 = centring")
      ->group(km);
  app.add_option("--kmeans-k", f.kmeans_k, "of keys")->group(km);
  app.add_option("--kmeans-v", f.kmeans_v, "of values")->group(km);
  app.add_option("--kmeans-scope", f.kmeans_scope,
                 "kv_head, or joint: one for all heads of a token (SAW-INT4's tool) [kv_head]")
      ->group(km);
  app.add_option("--kmeans-order", f.kmeans_order, "cluster before or after the rotation [before]")->group(km);
  app.add_option("--kmeans-restarts", f.kmeans_restarts, "seedings tried, the best is kept [1]")->group(km);

  const std::string run = "Running";
  app.add_option("--threads", f.threads, "threads [all cores]; results do not depend on it")
      ->check(CLI::Range(0, 4096))
      ->group(run);
  app.add_option("--seed", f.seed, "seed of sample and random rotations")->capture_default_str()->group(run);
  app.add_option("--sample-tokens", f.sample_tokens, "tokens a layer kept for clip and sign search")
      ->check(CLI::Range(16, 1 << 24))
      ->capture_default_str()
      ->group(run);
  app.add_option("--golden-tokens", f.golden_tokens,
                 "tokens a layer kept with their codes, for self-tests of runtimes; 0 = none")
      ->check(CLI::Range(std::int64_t{0}, kMostGoldenTokens))
      ->capture_default_str()
      ->group(run);
  app.add_option("--collect", f.collect,
                 "also collect these moments: query key value scored_value scored_query sst, or all")
      ->group(run);
  app.add_option("--context", f.context, "context length of the effective bits in the table")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30))
      ->capture_default_str()
      ->group(run);
  app.add_flag("--report-rotations", f.report_rotations, "also print OSCAR Table 10 and Figure 7 for each layer")
      ->group(run);
  app.add_flag("--report-outliers", f.report_outliers,
               "also print the outlier gain of each head, whatever the transform")
      ->group(run);
  app.add_flag("--json", f.json, "one JSON document on stdout")->group(run);
  app.add_flag("-q,--quiet", f.quiet, "no progress, no table")->group(run);
}

namespace {

void apply_allocation(const CalibrateFlags& f, Options& options) {
  if (f.k_allocation)
    options.k.allocate =
        pick("--k-allocation", *f.k_allocation, {Allocate::none, Allocate::rope_block, Allocate::channel});
  if (f.v_allocation) options.v.allocate = pick("--v-allocation", *f.v_allocation, {Allocate::none, Allocate::channel});
  if (f.score) {
    block_score(*f.score, 0.0, 0.0);  // throws for unknown names
    options.score = *f.score;
  }
  if (f.mixing && *f.mixing != "haar" && *f.mixing != "hadamard")
    throw Error{ErrorKind::usage, fmt::format("--mixing: expected haar or hadamard, found \"{}\"", *f.mixing)};
  if (f.mixing) options.mixing = *f.mixing;
  if (f.min_bits) options.min_bits = *f.min_bits;
  if (f.max_bits) options.max_bits = *f.max_bits;
  if (f.memory) options.memory = *f.memory;
  if (f.row_bytes_k) options.k.row_bytes = *f.row_bytes_k;
  if (f.row_bytes_v) options.v.row_bytes = *f.row_bytes_v;
  for (const Side side : kSides)
    if (options.side(side).row_bytes > 0 && options.side(side).allocate == Allocate::none)
      throw Error{ErrorKind::usage, fmt::format("--row-bytes-{}: this side has one width for all channels", name(side)),
                  "--v-allocation channel gives values widths of their own"};
  if (f.hessian && *f.hessian != "none" && *f.hessian != "paper" && *f.hessian != "consistent")
    throw Error{ErrorKind::usage,
                fmt::format("--hessian: expected none, paper or consistent, found \"{}\"", *f.hessian)};
  if (f.hessian) options.hessian = *f.hessian;
}

/// With klt, a side of kvq or block-gtq without an allocation flag gets widths by channel. With balanced, a side of kvq
/// without an allocation flag gets one width.
void apply_transform(const CalibrateFlags& f, Options& options) {
  const auto set = [&](const char* flag, const std::optional<std::string>& word, bool allocation_given,
                       SideOptions& side) {
    if (!word) return;
    side.transform = pick(
        flag, *word, {TransformKind::orthogonal, TransformKind::diagonal, TransformKind::balanced, TransformKind::klt});
    options.choose_transform = false;
    const bool allocates = options.method == "kvq" || options.method == "block-gtq";
    if (side.transform == TransformKind::klt && allocates && !allocation_given) side.allocate = Allocate::channel;
    const bool mixes = side.transform == TransformKind::balanced;
    if (mixes && options.method == "kvq" && !allocation_given) side.allocate = Allocate::none;
  };
  set("--transform", f.transform, f.k_allocation.has_value(), options.k);
  set("--transform", f.transform, f.v_allocation.has_value(), options.v);
  set("--transform-k", f.transform_k, f.k_allocation.has_value(), options.k);
  set("--transform-v", f.transform_v, f.v_allocation.has_value(), options.v);
  // With --method kvq, channels may get width 0 only with klt, because only the basis of klt has channels that are
  // worth nothing. Without klt the least width is 1.
  const bool klt = options.choose_transform || options.k.transform == TransformKind::klt ||
                   options.v.transform == TransformKind::klt;
  if (options.method == "kvq" && !klt && !f.min_bits) options.min_bits = 1;
}

void apply_budget(const CalibrateFlags& f, Options& options) {
  if (f.budget_bits) options.budget_bits = *f.budget_bits;
  if (f.budget_bytes) {
    if (!f.budget_bits) options.budget_bits = std::nullopt;
    options.budget_bytes = *f.budget_bytes;
  }
  options.uniform_layout = f.uniform_layout;
  options.budget_per_layer = f.budget_per_layer;
  if (options.method == "kvq" && (f.bits || f.bits_k || f.bits_v || f.row_bytes_k || f.row_bytes_v))
    throw Error{ErrorKind::usage, "--method kvq spends one budget: --bits and --row-bytes have no meaning",
                "use --budget-bits or --budget-bytes"};
  if (options.method != "block-gtq") return;
  for (const auto& [flag, bits, row_bytes] :
       {std::tuple{"-k", f.bits_k, f.row_bytes_k}, {"-v", f.bits_v, f.row_bytes_v}})
    if (f.joint && ((bits && *bits != 16) || row_bytes))
      throw Error{ErrorKind::usage,
                  fmt::format("--joint spends one budget: --bits{} other than 16 and --row-bytes{} have no meaning",
                              flag, flag),
                  "use --bits, --budget-bits or --budget-bytes"};
  if (f.joint && f.bits && (f.budget_bits || f.budget_bytes))
    throw Error{ErrorKind::usage, "--bits and a budget: expected one of both with --joint"};
  if (f.joint && f.bits && !(*f.bits >= 1 && *f.bits <= 8))
    throw Error{ErrorKind::usage, fmt::format("--joint --bits: expected 1 to 8, found {}", *f.bits)};
  if (f.joint && !f.budget_bits && !f.budget_bytes) options.budget_bits = f.bits.value_or(2.0);
  if (!f.joint && (f.budget_bits || f.budget_bytes || f.uniform_layout || f.budget_per_layer))
    throw Error{ErrorKind::usage, "--budget-bits, --budget-bytes, --uniform-layout and --budget-per-layer need --joint",
                "or --bits, --row-bytes-k and --row-bytes-v for each layer alike"};
}

void apply_kmeans(const CalibrateFlags& f, Options& options) {
  const auto set = [](const std::optional<int>& count, SideOptions& side) {
    if (!count) return;
    side.kmeans = *count == 1 ? 0 : *count;
    side.center = side.center || *count == 1;  // one centroid is the mean, so --kmeans 1 means a center
  };
  set(f.kmeans, options.k);
  set(f.kmeans, options.v);
  set(f.kmeans_k, options.k);
  set(f.kmeans_v, options.v);
  if (f.kmeans_scope && *f.kmeans_scope != "kv_head" && *f.kmeans_scope != "joint")
    throw Error{ErrorKind::usage,
                fmt::format("--kmeans-scope: expected kv_head or joint, found \"{}\"", *f.kmeans_scope)};
  if (f.kmeans_order && *f.kmeans_order != "before" && *f.kmeans_order != "after")
    throw Error{ErrorKind::usage,
                fmt::format("--kmeans-order: expected before or after, found \"{}\"", *f.kmeans_order)};
  if ((f.kmeans_scope || f.kmeans_order || f.kmeans_restarts) && options.k.kmeans == 0 && options.v.kmeans == 0)
    throw Error{ErrorKind::usage, "--kmeans-scope, --kmeans-order and --kmeans-restarts need --kmeans of 2 or more"};
  options.kmeans_joint = f.kmeans_scope && *f.kmeans_scope == "joint";
  options.kmeans_after = f.kmeans_order && *f.kmeans_order == "after";
  if (f.kmeans_restarts) options.kmeans_restarts = *f.kmeans_restarts;
}

}  // namespace

Options resolve_options(const CalibrateFlags& f) {
  Options options;
  options.method = f.method;
  find_method(f.method).set_defaults(options);
  refuse_foreign_flags(f);
  check_ranges(f);
  refuse_overwriting(f);
  refuse_without_dump(f);
  options.seed = static_cast<std::uint64_t>(f.seed);
  apply_coder(f, f.coder_k, "--coder-k", options.k);
  apply_coder(f, f.coder_v, "--coder-v", options.v);
  apply_allocation(f, options);
  apply_transform(f, options);
  apply_kmeans(f, options);
  if (f.memory && options.k.coder != CoderKind::trellis && options.v.coder != CoderKind::trellis)
    throw Error{ErrorKind::usage, "--memory needs --coder trellis"};
  if (f.score && options.k.allocate != Allocate::rope_block)
    throw Error{ErrorKind::usage, "--score needs --k-allocation rope_block: it scores RoPE blocks"};
  apply_budget(f, options);
  if (f.bits && !f.joint) options.k.bits = options.v.bits = *f.bits;  // with --joint, --bits is the budget
  if (f.bits_k) options.k.bits = *f.bits_k;
  if (f.bits_v) options.v.bits = *f.bits_v;
  apply_clip("--clip", f.clip, options.k);
  apply_clip("--clip", f.clip, options.v);
  apply_clip("--clip-k", f.clip_k, options.k);
  apply_clip("--clip-v", f.clip_v, options.v);
  if (f.center && (f.kmeans == 1 || f.kmeans_k == 1 || f.kmeans_v == 1))
    throw Error{ErrorKind::usage, "--center and --kmeans 1 say the same thing: expected one of both"};
  if (f.center) apply_sides("--center", *f.center, options.k.center, options.v.center);
  if (f.hadamard) apply_sides("--hadamard", *f.hadamard, options.k.hadamard, options.v.hadamard);
  if (f.sink_tokens) options.windows.sink_tokens = *f.sink_tokens;
  if (f.recent_tokens) options.windows.recent_tokens = *f.recent_tokens;
  if (!f.exact_layers.empty()) options.exact_layers = parse_int_list(f.exact_layers, "--exact-layers");
  if (f.share) options.scope = pick("--share", *f.share, {Scope::kv_head, Scope::layer});
  if (f.composition) options.composition = pick_composition(*f.composition);
  if (f.target_k)
    options.k.target = pick_target("--target-k", *f.target_k, {Moment::query, Moment::scored_query, Moment::key});
  if (f.target_v)
    options.v.target = pick_target("--target-v", *f.target_v, {Moment::scored_value, Moment::sst, Moment::value});
  if (f.sign_search) options.sign_search = *f.sign_search;
  if (f.hadamard_order) options.hadamard_order = *f.hadamard_order;
  options.random_signs = f.random_signs;
  check_options(options);
  return options;
}

std::filesystem::path resolve_output(const CalibrateFlags& f) {
  if (!f.output.empty()) return f.output;
  if (f.dumps.empty()) throw Error{ErrorKind::usage, "--output is needed when there is no --model"};
  std::filesystem::path path = f.dumps.front();
  return path.replace_extension(".kvq.safetensors");
}

}  // namespace kvq
