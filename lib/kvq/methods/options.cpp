#include <kvq/core/error.h>
#include <kvq/methods/make_coder.h>
#include <kvq/methods/options.h>

#include <fmt/ranges.h>

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

bool is_bit_width(double bits) { return bits == 16 || (bits >= 1 && bits <= 8); }

bool is_clip_ratio(double ratio) { return ratio > 0.0 && ratio <= 1.0; }

std::string own_side_flag(const char* flag, Side side) { return fmt::format("{}-{}", flag, name(side)); }

namespace {

/// "a, b or c"
std::string coders_with_mixed_widths() {
  std::vector<const char*> words;
  for (const CoderKind kind : kCoderKinds)
    if (traits_of(kind).has_mixed_widths) words.push_back(to_string(kind));
  const char* last = words.back();
  words.pop_back();
  return fmt::format("{} or {}", fmt::join(words, ", "), last);
}

void check_side(const SideOptions& side, Side which, const SideFlag& flag_of) {
  if (!is_bit_width(side.bits))
    throw Error{ErrorKind::usage,
                fmt::format("{}: expected 1 to 8, or 16 for exact, found {}", flag_of("--bits", which), side.bits)};
  if (side.bits != std::floor(side.bits) && side.allocate == Allocate::none)
    throw Error{ErrorKind::usage,
                fmt::format("{}: {} is no whole number, and this side has one width for all channels",
                            flag_of("--bits", which), side.bits),
                "fractions go with allocated widths, such as --method block-gtq"};
  const bool affine = side.coder == CoderKind::affine, symmetric = side.coder == CoderKind::symmetric;
  if (affine && side.rule != ScaleRule::minmax)
    throw Error{ErrorKind::usage,
                fmt::format("--scale-rule {} needs {} symmetric", to_string(side.rule), flag_of("--coder", which)),
                "affine codes use minmax"};
  if (!affine && side.rule == ScaleRule::minmax)
    throw Error{ErrorKind::usage, fmt::format("--scale-rule minmax needs {} affine", flag_of("--coder", which)),
                "symmetric codes use absmax, least_squares or norm"};
  if (!affine && side.clip != 1.0)
    throw Error{ErrorKind::usage,
                fmt::format("{} has no meaning for {} {}: clipping belongs to min-max ranges", flag_of("--clip", which),
                            flag_of("--coder", which), to_string(side.coder))};
  if ((side.rule == ScaleRule::absmax && !symmetric) || (side.rule == ScaleRule::rms && symmetric))
    throw Error{ErrorKind::usage,
                fmt::format("--scale-rule {} has no meaning for {} {}", to_string(side.rule), flag_of("--coder", which),
                            to_string(side.coder)),
                symmetric ? "symmetric codes use absmax, least_squares or norm"
                          : "codebook and trellis codes use norm, least_squares or rms"};
  const CoderTraits& coder = traits_of(side.coder);
  if (side.allocate == Allocate::none && side.bits != 16 && side.bits > coder.most_bits)
    throw Error{ErrorKind::usage, fmt::format("{}: {} codes have 1 to {} bits, found {}", flag_of("--bits", which),
                                              to_string(side.coder), coder.most_bits, side.bits)};
  if (side.allocate != Allocate::none && !coder.has_mixed_widths)
    throw Error{ErrorKind::usage, fmt::format("mixed widths of {} need {} {}", plural(which), flag_of("--coder", which),
                                              coders_with_mixed_widths())};
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
                  fmt::format("{} {} mixes channels, and RoPE blocks with it", flag_of("--transform", which),
                              to_string(side.transform)),
                  "use --transform diagonal, or --k-allocation channel"};
    if (side.transform == TransformKind::klt && side.allocate != Allocate::channel)
      throw Error{ErrorKind::usage,
                  fmt::format("{} klt gives channels widths of their own, and this side has one width",
                              flag_of("--transform", which)),
                  "use --transform balanced, or --method block-gtq or kvq"};
  }
  if (side.kmeans > 0 && side.center)
    throw Error{ErrorKind::usage, "--kmeans and --center: centroids take the place of the centre",
                "--kmeans 1 is --center"};
  if (side.clip && !is_clip_ratio(*side.clip))
    throw Error{ErrorKind::usage,
                fmt::format("{}: expected a ratio in (0, 1], found {}", flag_of("--clip", which), *side.clip)};
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

const char* to_string(BlockScore score) {
  switch (score) {
    case BlockScore::qk_avg: return "qk_avg";
    case BlockScore::qk_max: return "qk_max";
    case BlockScore::qk_product: return "qk_product";
    case BlockScore::k_only: return "k_only";
    case BlockScore::q_only: return "q_only";
    case BlockScore::qk_energy_product: return "qk_energy_product";
  }
  return "?";
}

const char* to_string(ScaleScope scope) { return scope == ScaleScope::segment ? "segment" : "row"; }
const char* to_string(Weigh weigh) { return weigh == Weigh::bits ? "bits" : "bytes"; }
const char* to_string(Target target) { return target == Target::runtime ? "runtime" : "free"; }
const char* to_string(Mixing mixing) { return mixing == Mixing::haar ? "haar" : "hadamard"; }

const char* to_string(CompositionId composition) { return composition_of(composition).name.c_str(); }

void check_contradictions(const Options& options, const SideFlag& flag_of) {
  check_side(options.k, Side::k, flag_of);
  check_side(options.v, Side::v, flag_of);
  if ((options.budget_bits || options.budget_bytes) && (options.k.kmeans > 0 || options.v.kmeans > 0))
    throw Error{ErrorKind::usage, "--kmeans does not go with one budget over layers and sides",
                "use a method without --budget-bits, --budget-bytes and --joint"};
  if (options.uniform_layout && options.budget_per_layer)
    throw Error{ErrorKind::usage, "--uniform-layout and --budget-per-layer exclude each other",
                "equal rows in all layers already spend the same in each"};
  if (options.min_bits < 0 || options.max_bits < 1 || options.max_bits > 8 || options.min_bits > options.max_bits)
    throw Error{ErrorKind::usage,
                fmt::format("--min-bits and --max-bits: expected 0 <= min <= max, and max from 1 to 8, found {} and {}",
                            options.min_bits, options.max_bits)};
  if (options.budget_bits && options.budget_bytes)
    throw Error{ErrorKind::usage, "--budget-bits and --budget-bytes: expected one of both"};
}

}  // namespace kvq
