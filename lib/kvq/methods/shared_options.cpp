#include <kvq/core/error.h>
#include <kvq/core/int_list.h>
#include <kvq/methods/make_coder.h>
#include <kvq/methods/shared_options.h>

#include <fmt/format.h>

#include <cerrno>
#include <cmath>
#include <cstdlib>

namespace kvq {

namespace {

using option_group::kCentroids, option_group::kRunning, option_group::kStorage, option_group::kTransforms;

constexpr int kMostTokens = 1073741823, kMostChannels = 1024;  // as in the schemas

constexpr const char* kTransformNotes =
    "Transforms (keys k A and queries q A^-T give the same logits; which A has the smallest error?):\n"
    "  orthogonal  A rotates: what the model's scaling gave a channel, it keeps or spreads\n"
    "  diagonal    a scale a channel before the rotation, cheap beside fast Hadamards; undoes outliers\n"
    "  balanced    rows and the metric of their errors become alike: the smallest error of one width\n"
    "  klt         the same coordinates with widths by channel: block-gtq and kvq\n"
    "  Their outlier gain, squared error of orthogonal over that of balanced rows, is in the closing table.";

/// Writes 2 instead of 2.0.
Json number_to_json(double value) { return value == std::floor(value) ? Json(static_cast<int>(value)) : Json(value); }

bool has_clusters(const Options& o) { return o.k.kmeans > 1 || o.v.kmeans > 1; }

bool has_trellis(const Options& o) { return o.k.coder == CoderKind::trellis || o.v.coder == CoderKind::trellis; }

OptionSpec bits_option(const char* flag, const char* help, Sides sides, const SideManifest& manifest = {}) {
  return side_option(
      {.text = {.flag = flag, .group = kStorage, .help = help, .notes = {}, .value = "BITS"},
       .kind = OptionKind::number},
      sides,
      [flag](SideOptions& side, const OptionValue& value) {
        const double bits = std::get<double>(value);
        if (!is_bit_width(bits))
          throw Error{ErrorKind::usage, fmt::format("{}: expected 1 to 8, or 16 for exact, found {}", flag, bits)};
        side.bits = bits;
      },
      manifest);
}

OptionSpec coder_option(const char* flag, const char* help, Sides sides, const SideManifest& manifest = {}) {
  std::vector<CoderKind> kinds(kCoderKinds.begin(), kCoderKinds.end());
  std::erase(kinds, CoderKind::exact);  // --bits 16
  return side_choice<CoderKind>({flag, kStorage, help}, sides, &SideOptions::coder, kinds, manifest);
}

OptionSpec codebook_option() {
  OptionSpec spec{
      .text = {"--codebook", kStorage,
               "lloyd-max (exact for the group) or fitted (to the sample); implies --coder codebook"},
      .choices = {{"lloyd-max"}, {"fitted"}},
  };
  return side_option(
      std::move(spec), Sides::kv,
      [](SideOptions& side, const OptionValue& value) { side.fitted = std::get<std::string>(value) == "fitted"; },
      {.key = "fitted",
       .value = [](const SideOptions& s) { return s.coder == CoderKind::codebook ? Json(s.fitted) : Json(); }});
}

std::optional<double> parse_clip(const std::string& flag, const std::string& text) {
  if (text == "search") return std::nullopt;
  if (text == "none") return 1.0;
  char* end = nullptr;
  errno = 0;
  const double ratio = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || errno == ERANGE)
    throw Error{ErrorKind::usage, fmt::format("{}: expected search, none or a ratio, found \"{}\"", flag, text)};
  if (!is_clip_ratio(ratio))
    throw Error{ErrorKind::usage, fmt::format("{}: expected a ratio in (0, 1], found {}", flag, ratio)};
  return ratio;
}

OptionSpec clip_option(const char* flag, const char* help, Sides sides, const SideManifest& manifest = {}) {
  return side_option(
      {.text = {.flag = flag, .group = kStorage, .help = help, .notes = {}, .value = "RATIO"}}, sides,
      [flag](SideOptions& side, const OptionValue& value) {
        side.clip = parse_clip(flag, std::get<std::string>(value));
      },
      manifest);
}

OptionSpec group_size_option() {
  OptionSpec spec{
      .text = {"--group-size", kStorage,
               "channels that share a scale [64 for oscar where it divides head_dim, else head_dim]"},
      .kind = OptionKind::integer,
      .integers = {0, kMostChannels},
  };
  return side_option(
      std::move(spec), Sides::kv,
      [](SideOptions& s, const OptionValue& v) { s.group_size = static_cast<int>(std::get<std::int64_t>(v)); },
      {.key = "group_size", .value = [](const SideOptions& s) { return Json(s.group_size); }});
}

OptionSpec window_option(const char* flag, const char* help, int Windows::* field) {
  OptionSpec spec{.text = {flag, kStorage, help}, .kind = OptionKind::integer, .integers = {0, kMostTokens}};
  spec.set = [field](Options& o, const OptionValue& value) {
    o.windows.*field = static_cast<int>(std::get<std::int64_t>(value));
  };
  spec.check = [field, flag](const Options& o) { check_range(flag, {0, kMostTokens}, o.windows.*field); };
  return spec;
}

OptionSpec exact_layers_option() {
  OptionSpec spec{.text = {.flag = "--exact-layers",
                           .group = kStorage,
                           .help = "layers to keep in 16 bit, such as 0,35",
                           .notes = {},
                           .value = "LIST"}};
  spec.set = [](Options& o, const OptionValue& value) {
    const auto& text = std::get<std::string>(value);
    if (!text.empty()) o.exact_layers = parse_int_list(text, "--exact-layers");
  };
  write_in_manifest(spec, {.key = "exact_layers"}, [](const Options& o) { return Json(o.exact_layers); });
  return spec;
}

OptionSpec transform_option(OptionText text, Sides sides, const SideManifest& manifest = {}) {
  text.group = kTransforms;
  return side_choice<TransformKind>(
      std::move(text), sides, &SideOptions::transform,
      {TransformKind::orthogonal, TransformKind::diagonal, TransformKind::balanced, TransformKind::klt}, manifest);
}

/// One centroid is the mean, so --kmeans 1 means a center.
OptionSpec kmeans_option(const char* flag, const char* help, Sides sides, const SideManifest& manifest = {}) {
  return side_option(
      {.text = {flag, kCentroids, help}, .kind = OptionKind::integer, .integers = {1, 4096}}, sides,
      [](SideOptions& side, const OptionValue& value) {
        const auto count = static_cast<int>(std::get<std::int64_t>(value));
        side.kmeans = count == 1 ? 0 : count;
        side.center = side.center || count == 1;
      },
      manifest);
}

/// A switch that is typed as one of two words.
OptionSpec kmeans_word(const char* flag, const char* help, bool Options::* field, const char* key, const char* off,
                       const char* on) {
  OptionSpec spec{.text = {flag, kCentroids, help}, .choices = {{off}, {on}}};
  spec.set = [field, on](Options& o, const OptionValue& value) { o.*field = std::get<std::string>(value) == on; };
  write_in_manifest(spec, {.key = key, .when = has_clusters},
                    [=](const Options& o) { return Json(o.*field ? on : off); });
  return spec;
}

OptionSpec seed_option() {
  OptionSpec spec{
      .text = {"--seed", kRunning, "seed of sample and random rotations"},
      .kind = OptionKind::integer,
      .integers = {0, std::numeric_limits<std::int64_t>::max()},
      .shown_default = "0",
  };
  spec.set = [](Options& o, const OptionValue& value) {
    o.seed = static_cast<std::uint64_t>(std::get<std::int64_t>(value));
  };
  return spec;
}

/// `own` names the side's own flag, such as --coder-k.
bool is_given(const GivenOptions& given, const char* both, Side side) {
  return given.has(both) || given.has(fmt::format("{}-{}", both, name(side)));
}

void settle_coder(Options& options, const Options& defaults, const GivenOptions& given) {
  if (given.has("--codebook") && given.value<std::string>("--coder").value_or("codebook") != "codebook")
    throw Error{ErrorKind::usage, "--codebook needs --coder codebook, which it implies"};
  for (const Side which : kSides) {
    SideOptions& side = options.side(which);
    if (given.has("--codebook") && !given.has(fmt::format("--coder-{}", name(which)))) side.coder = CoderKind::codebook;
    if (side.coder == defaults.side(which).coder) continue;
    const ScaleRule rule = traits_of(side.coder).default_rule;
    if (!given.has("--scale-rule")) side.rule = rule;
    if (rule != ScaleRule::minmax && !is_given(given, "--clip", which)) side.clip = 1.0;
  }
  if (given.has("--memory") && !has_trellis(options)) throw Error{ErrorKind::usage, "--memory needs --coder trellis"};
}

void settle_kmeans(const Options& options, const GivenOptions& given) {
  for (const char* flag : {"--kmeans", "--kmeans-k", "--kmeans-v"})
    if (given.has("--center") && given.value<std::int64_t>(flag) == 1)
      throw Error{ErrorKind::usage, "--center and --kmeans 1 say the same thing: expected one of both"};
  for (const char* flag : {"--kmeans-scope", "--kmeans-order", "--kmeans-restarts"})
    if (given.has(flag) && !has_clusters(options))
      throw Error{ErrorKind::usage, "--kmeans-scope, --kmeans-order and --kmeans-restarts need --kmeans of 2 or more"};
}

std::vector<OptionSpec> coder_options() {
  return {
      bits_option("--bits", "code bits: 1 to 8, 16 = exact; fractions where widths are allocated", Sides::kv,
                  {.key = "bits", .value = [](const SideOptions& s) { return number_to_json(s.bits); }}),
      bits_option("--bits-k", "of keys", Sides::k),
      bits_option("--bits-v", "of values", Sides::v),
      coder_option("--coder", "affine (scale, minimum), symmetric (scale), codebook (Lloyd-Max) or trellis", Sides::kv,
                   {.key = "coder", .value = [](const SideOptions& s) { return Json(to_string(s.coder)); }}),
      coder_option("--coder-k", "of keys", Sides::k),
      coder_option("--coder-v", "of values", Sides::v),
      codebook_option(),
      integer_option(
          {"--memory", kStorage, "trellis: codes that a value looks back on, 1 to 3; more is better and slower [3]"},
          &Options::memory, {1, 3}, {.key = "memory", .when = has_trellis}),
      side_choice<ScaleRule>(
          {"--scale-rule", kStorage, "minmax (affine); norm, least_squares, absmax (symmetric), rms (codebook) [norm]"},
          Sides::kv, &SideOptions::rule,
          {ScaleRule::minmax, ScaleRule::absmax, ScaleRule::least_squares, ScaleRule::norm, ScaleRule::rms},
          {.key = "scale_rule", .value = [](const SideOptions& s) { return Json(to_string(s.rule)); }}),
      side_choice<ScaleType>(
          {"--scale-type", kStorage, "fp16, bf16 or fp32 [fp16]"}, Sides::kv, &SideOptions::scale_type,
          {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32},
          {.key = "scale_type", .value = [](const SideOptions& s) { return Json(to_string(s.scale_type)); }}),
      side_choice<ZeroKind>(
          {"--zero", kStorage, "affine: float (minimum) or integer (zero point, SAW-INT4 Eq. 3-4) [float]"}, Sides::kv,
          &SideOptions::zero, {ZeroKind::floating, ZeroKind::integer},
          {.key = "zero", .value = [](const SideOptions& s) { return Json(to_string(s.zero)); }}),
      group_size_option(),
  };
}

std::vector<OptionSpec> row_options() {
  return {
      clip_option(
          "--clip", "clip ratio of both sides: search, none or a number [oscar: search]", Sides::kv,
          {.key = "clip", .value = [](const SideOptions& s) { return s.clip ? Json(*s.clip) : Json("search"); }}),
      clip_option("--clip-k", "of keys; OSCAR serves 0.96", Sides::k),
      clip_option("--clip-v", "of values; OSCAR serves 0.92", Sides::v),
      named_sides({"--center", kStorage, "subtract channel means: none, k, v or kv [none]"}, &SideOptions::center,
                  "center", false),
      window_option("--sink-tokens", "first tokens that stay exact [oscar: 64]", &Windows::sink_tokens),
      window_option("--recent-tokens", "last tokens that stay exact [oscar: 256]", &Windows::recent_tokens),
      exact_layers_option(),
      choice_option<Scope>(
          {"--share", kStorage, "kv_head (own rotation per head) or layer (average over heads) [kv_head]"},
          &Options::scope, {Scope::kv_head, Scope::layer}, {.key = "share"}),
      transform_option({.flag = "--transform",
                        .group = {},
                        .help = "orthogonal (none), diagonal, balanced or klt, see below [orthogonal; kvq: chosen]",
                        .notes = kTransformNotes},
                       Sides::kv,
                       {.key = "transform",
                        .value =
                            [](const SideOptions& s) {
                              return s.transform != TransformKind::orthogonal ? Json(to_string(s.transform)) : Json();
                            }}),
      transform_option({"--transform-k", {}, "of keys"}, Sides::k),
      transform_option({"--transform-v", {}, "of values"}, Sides::v),
  };
}

}  // namespace

std::vector<OptionSpec> storage_options() {
  std::vector<OptionSpec> all = coder_options();
  for (OptionSpec& spec : row_options()) all.push_back(std::move(spec));
  return all;
}

std::vector<OptionSpec> centroid_options() {
  return {
      kmeans_option(
          "--kmeans", "code residuals of C centroids, 1 to 4096, keys and values; 1 = centring", Sides::kv,
          {.key = "kmeans", .value = [](const SideOptions& s) { return s.kmeans > 0 ? Json(s.kmeans) : Json(); }}),
      kmeans_option("--kmeans-k", "of keys", Sides::k),
      kmeans_option("--kmeans-v", "of values", Sides::v),
      kmeans_word("--kmeans-scope", "kv_head, or joint: one for all heads of a token (SAW-INT4's tool) [kv_head]",
                  &Options::kmeans_joint, "kmeans_scope", "kv_head", "joint"),
      kmeans_word("--kmeans-order", "cluster before or after the rotation [before]", &Options::kmeans_after,
                  "kmeans_order", "before", "after"),
      integer_option({"--kmeans-restarts", kCentroids, "seedings tried, the best is kept [1]"},
                     &Options::kmeans_restarts, {1, 100}, {.key = "kmeans_restarts", .when = has_clusters}),
      seed_option(),
  };
}

void settle_shared(Options& options, const Options& defaults, const GivenOptions& given) {
  settle_coder(options, defaults, given);
  settle_kmeans(options, given);
}

}  // namespace kvq
