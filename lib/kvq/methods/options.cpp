#include <kvq/core/error.h>
#include <kvq/methods/options.h>

#include <algorithm>
#include <cmath>

namespace kvq {

int resolve_group_size(int asked, int preferred, int dim, int layer, Side side) {
  if (asked == 0) return preferred > 0 && dim % preferred == 0 ? preferred : dim;
  if (dim % asked == 0) return asked;
  std::string divisors;
  for (int g = 8; g <= dim; ++g)
    if (dim % g == 0) divisors += fmt::format("{}{}", divisors.empty() ? "" : ", ", g);
  throw Error{ErrorKind::usage,
              fmt::format("layer {} {}: --group-size {} does not divide head_dim {}", layer, name(side), asked, dim),
              fmt::format("choose one of {}", divisors)};
}

namespace {

void check_side(const SideOptions& side, Side which) {
  if (side.bits != 16 && !(side.bits >= 1 && side.bits <= 8))
    throw Error{ErrorKind::usage,
                fmt::format("--bits-{}: expected 1 to 8, or 16 for exact, found {}", name(which), side.bits)};
  if (side.bits != std::floor(side.bits) && side.allocate == Allocate::none)
    throw Error{ErrorKind::usage,
                fmt::format("--bits-{}: {} is no whole number, and this side has one width for all channels",
                            name(which), side.bits),
                "fractions go with allocated widths, such as --method block-gtq"};
  const bool affine = side.coder == CoderKind::affine, symmetric = side.coder == CoderKind::symmetric;
  if (affine && side.rule != ScaleRule::minmax)
    throw Error{ErrorKind::usage, fmt::format("--scale-rule {} needs --coder symmetric", to_string(side.rule)),
                "affine codes use minmax"};
  if (!affine && side.rule == ScaleRule::minmax)
    throw Error{ErrorKind::usage, "--scale-rule minmax needs --coder affine",
                "symmetric codes use absmax, least_squares or norm"};
  if (!affine && side.clip != 1.0)
    throw Error{ErrorKind::usage,
                fmt::format("--clip-{} has no meaning for --coder {}: clipping belongs to min-max ranges", name(which),
                            to_string(side.coder))};
  if ((side.rule == ScaleRule::absmax && !symmetric) || (side.rule == ScaleRule::rms && symmetric))
    throw Error{
        ErrorKind::usage,
        fmt::format("--scale-rule {} has no meaning for --coder {}", to_string(side.rule), to_string(side.coder)),
        symmetric ? "symmetric codes use absmax, least_squares or norm"
                  : "codebook and trellis codes use norm, least_squares or rms"};
  if (side.coder == CoderKind::trellis && side.allocate == Allocate::none && side.bits != 16 && side.bits > 4)
    throw Error{ErrorKind::usage,
                fmt::format("--bits-{}: trellis codes have 1 to 4 bits, found {}", name(which), side.bits)};
  if (side.allocate != Allocate::none && affine)
    throw Error{ErrorKind::usage,
                fmt::format("mixed widths of {} need --coder symmetric, codebook or trellis", plural(which))};
  if (side.allocate != Allocate::none && side.group_size != 0)
    throw Error{ErrorKind::usage, "--group-size has no meaning for mixed widths: channels of one width are one group"};
  if (side.kmeans < 0 || side.kmeans > 4096)
    throw Error{ErrorKind::usage, fmt::format("--kmeans: expected 1 to 4096, found {}", side.kmeans)};
  if (side.kmeans > 0 && side.allocate != Allocate::none)
    throw Error{ErrorKind::usage,
                fmt::format("--kmeans of {}: residual codes of mixed widths are not built", plural(which)),
                "use it with one width for all channels; --center goes with mixed widths"};
  if (side.transform != TransformKind::orthogonal && side.bits != 16) {
    const bool mixes = side.transform == TransformKind::balanced || side.transform == TransformKind::klt;
    if (side.kmeans > 1)
      throw Error{ErrorKind::usage,
                  fmt::format("--kmeans of {} and --transform {}: residual codes of transformed rows are not built",
                              name(which), to_string(side.transform)),
                  "--center goes with transforms"};
    if (mixes && side.allocate == Allocate::rope_block)
      throw Error{ErrorKind::usage,
                  fmt::format("--transform-{} {} mixes channels, and RoPE blocks with it", name(which),
                              to_string(side.transform)),
                  "use --transform diagonal, or --k-allocation channel"};
    if (side.transform == TransformKind::klt && side.allocate != Allocate::channel)
      throw Error{ErrorKind::usage,
                  fmt::format("--transform-{} klt gives channels widths of their own, and this side has one width",
                              name(which)),
                  "use --transform balanced, or --method block-gtq or kvq"};
  }
  if (side.kmeans > 0 && side.center)
    throw Error{ErrorKind::usage, "--kmeans and --center: centroids take the place of the centre",
                "--kmeans 1 is --center"};
  if (side.clip && !(*side.clip > 0.0 && *side.clip <= 1.0))
    throw Error{ErrorKind::usage,
                fmt::format("--clip-{}: expected a ratio in (0, 1], found {}", name(which), *side.clip)};
}

/// Writes 2 instead of 2.0.
Json number_to_json(double value) { return value == std::floor(value) ? Json(static_cast<int>(value)) : Json(value); }

Json side_to_json(const SideOptions& side) {
  Json json = {{"bits", number_to_json(side.bits)},
               {"group_size", side.group_size},
               {"coder", to_string(side.coder)},
               {"scale_rule", to_string(side.rule)},
               {"scale_type", to_string(side.scale_type)},
               {"zero", to_string(side.zero)},
               {"center", side.center},
               {"target", to_string(side.target)},
               {"hadamard", side.hadamard}};
  if (side.clip)
    json["clip"] = *side.clip;
  else
    json["clip"] = "search";
  // Options that version 1.0 lacks appear only if they are used.
  if (side.coder == CoderKind::codebook) json["fitted"] = side.fitted;
  if (side.allocate != Allocate::none) json["allocate"] = to_string(side.allocate);
  if (side.row_bytes > 0) json["row_bytes"] = side.row_bytes;
  if (side.kmeans > 0) json["kmeans"] = side.kmeans;
  if (side.transform != TransformKind::orthogonal) json["transform"] = to_string(side.transform);
  return json;
}

}  // namespace

const char* to_string(Allocate allocate) {
  switch (allocate) {
    case Allocate::none: return "none";
    case Allocate::rope_block: return "rope_block";
    case Allocate::channel: return "channel";
  }
  return "?";
}

void check_options(const Options& options) {
  check_side(options.k, Side::k);
  check_side(options.v, Side::v);
  if (options.windows.sink_tokens < 0 || options.windows.recent_tokens < 0)
    throw Error{ErrorKind::usage, "--sink-tokens and --recent-tokens: expected 0 or more"};
  if ((options.budget_bits || options.budget_bytes) && (options.k.kmeans > 0 || options.v.kmeans > 0))
    throw Error{ErrorKind::usage, "--kmeans does not go with one budget over layers and sides",
                "use a method without --budget-bits, --budget-bytes and --joint"};
  if (options.uniform_layout && options.budget_per_layer)
    throw Error{ErrorKind::usage, "--uniform-layout and --budget-per-layer exclude each other",
                "equal rows in all layers already spend the same in each"};
  if (options.hessian != "none" && !options.k.hadamard && !options.v.hadamard)
    throw Error{ErrorKind::usage, "--hessian rotates the sides that --hadamard names, and it names none"};
  if (options.min_bits < 0 || options.max_bits < 1 || options.max_bits > 8 || options.min_bits > options.max_bits)
    throw Error{ErrorKind::usage,
                fmt::format("--min-bits and --max-bits: expected 0 <= min <= max, and max from 1 to 8, found {} and {}",
                            options.min_bits, options.max_bits)};
  if (options.memory < 1 || options.memory > 3)
    throw Error{ErrorKind::usage, fmt::format("--memory: expected 1 to 3, found {}", options.memory)};
  if (options.kmeans_restarts < 1 || options.kmeans_restarts > 100)
    throw Error{ErrorKind::usage,
                fmt::format("--kmeans-restarts: expected 1 to 100, found {}", options.kmeans_restarts)};
  if (options.budget_bits && options.budget_bytes)
    throw Error{ErrorKind::usage, "--budget-bits and --budget-bytes: expected one of both"};
  if (options.sign_search < 0 || options.sign_search > 4096)
    throw Error{ErrorKind::usage, fmt::format("--sign-search: expected 0 to 4096, found {}", options.sign_search)};
}

Json options_to_json(const Options& options) {
  Json json = {{"k", side_to_json(options.k)},
               {"v", side_to_json(options.v)},
               {"share", to_string(options.scope)},
               {"exact_layers", options.exact_layers},
               {"composition", options.composition},
               {"sign_search", options.sign_search},
               {"hadamard_order", options.hadamard_order},
               {"random_signs", options.random_signs}};
  const auto any = [&](auto test) { return test(options.k) || test(options.v); };
  if (options.hessian != "none") json["hessian"] = options.hessian;
  if (any([](const SideOptions& s) { return s.kmeans > 1; })) {
    json["kmeans_scope"] = options.kmeans_joint ? "joint" : "kv_head";
    json["kmeans_order"] = options.kmeans_after ? "after" : "before";
    json["kmeans_restarts"] = options.kmeans_restarts;
  }
  if (any([](const SideOptions& s) { return s.coder == CoderKind::trellis; })) json["memory"] = options.memory;
  if (any([](const SideOptions& s) { return s.allocate != Allocate::none; })) {
    json["score"] = options.score;
    json["min_bits"] = options.min_bits;
    json["max_bits"] = options.max_bits;
    json["mixing"] = options.mixing;
    json["rate_law"] = options.coder_law ? "coder" : "4^-b";
  }
  if (options.budget_bits) json["budget_bits"] = *options.budget_bits;
  if (options.budget_bytes) json["budget_bytes"] = *options.budget_bytes;
  if (options.budget_bits || options.budget_bytes) json["uniform_layout"] = options.uniform_layout;
  if (options.budget_per_layer) json["budget_per_layer"] = true;
  if (options.choose_basis) json["choose_basis"] = true;
  if (options.choose_transform) json["choose_transform"] = true;
  return json;
}

}  // namespace kvq
