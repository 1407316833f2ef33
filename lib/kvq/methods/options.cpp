#include <kvq/core/error.h>
#include <kvq/methods/options.h>

#include <algorithm>

namespace kvq {

int resolve_group_size(int asked, int preferred, int dim, int layer, char side) {
  if (asked == 0) return preferred > 0 && dim % preferred == 0 ? preferred : dim;
  if (dim % asked == 0) return asked;
  std::string divisors;
  for (int g = 8; g <= dim; ++g)
    if (dim % g == 0) divisors += fmt::format("{}{}", divisors.empty() ? "" : ", ", g);
  throw Error{ErrorKind::usage, fmt::format("layer {} {}: --group-size {} does not divide head_dim {}", layer, side, asked, dim),
              fmt::format("choose one of {}", divisors)};
}

namespace {

void check_side(const SideOptions& side, char name) {
  if (side.bits != 16 && (side.bits < 1 || side.bits > 8))
    throw Error{ErrorKind::usage, fmt::format("--bits-{}: expected 1 to 8, or 16 for exact, found {}", name, side.bits)};
  const bool affine = side.levels == UniformLevels::affine;
  if (affine && side.rule != ScaleRule::minmax)
    throw Error{ErrorKind::usage, fmt::format("--scale-rule {} needs --coder symmetric", to_string(side.rule)), "affine codes use minmax"};
  if (!affine && side.rule == ScaleRule::minmax)
    throw Error{ErrorKind::usage, "--scale-rule minmax needs --coder affine", "symmetric codes use absmax, least_squares or norm"};
  if (!affine && side.clip != 1.0)
    throw Error{ErrorKind::usage, fmt::format("--clip-{} has no meaning for --coder symmetric: clipping belongs to min-max ranges", name)};
  if (side.clip && !(*side.clip > 0.0 && *side.clip <= 1.0))
    throw Error{ErrorKind::usage, fmt::format("--clip-{}: expected a ratio in (0, 1], found {}", name, *side.clip)};
}

Json side_to_json(const SideOptions& side) {
  Json json = {{"bits", side.bits},
               {"group_size", side.group_size},
               {"coder", to_string(side.levels)},
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
  return json;
}

}  // namespace

void check_options(const Options& options) {
  check_side(options.k, 'k');
  check_side(options.v, 'v');
  if (options.windows.sink_tokens < 0 || options.windows.recent_tokens < 0)
    throw Error{ErrorKind::usage, "--sink-tokens and --recent-tokens: expected 0 or more"};
  if (options.sign_search < 0 || options.sign_search > 4096)
    throw Error{ErrorKind::usage, fmt::format("--sign-search: expected 0 to 4096, found {}", options.sign_search)};
}

Json options_to_json(const Options& options) {
  return {{"k", side_to_json(options.k)},
          {"v", side_to_json(options.v)},
          {"share", to_string(options.scope)},
          {"exact_layers", options.exact_layers},
          {"composition", options.composition},
          {"sign_search", options.sign_search},
          {"hadamard_order", options.hadamard_order},
          {"random_signs", options.random_signs}};
}

}  // namespace kvq
