#include <kvq/core/error.h>
#include <kvq/methods/method.h>
#include <kvq/methods/width_options.h>

#include <fmt/format.h>

#include <cmath>

namespace kvq {

namespace {

using option_group::kBudgets, option_group::kWidths;

bool allocates(const Options& o) { return o.k.allocate != Allocate::none || o.v.allocate != Allocate::none; }

bool has_budget(const Options& o) { return o.budget_bits || o.budget_bytes; }

OptionSpec score_option() {
  OptionSpec spec = choice_option<BlockScore>(
      {"--score", kWidths, "what a RoPE block is worth, see below [qk_avg; kvq: qk_energy_product]"}, &Options::score,
      {BlockScore::qk_avg, BlockScore::qk_max, BlockScore::qk_product, BlockScore::k_only, BlockScore::q_only,
       BlockScore::qk_energy_product},
      {.key = "score", .when = allocates});
  for (const OptionWord& choice : spec.choices)
    spec.text.notes += (spec.text.notes.empty() ? "Scores of a RoPE block: " : ", ") + choice.word;
  return spec;
}

OptionSpec allocation_option(const char* flag, const char* help, Sides side, const std::vector<Allocate>& values) {
  return side_choice<Allocate>({flag, kWidths, help}, side, &SideOptions::allocate, values,
                               {.key = "allocate", .value = [](const SideOptions& s) {
                                  return s.allocate != Allocate::none ? Json(to_string(s.allocate)) : Json();
                                }});
}

OptionSpec scales_option() {
  return choice_option<ScaleScope>(
      {"--scales", kWidths, "stored scales of a mixed row: one a segment, or one a row [segment; kvq: row]"},
      &Options::scales, {ScaleScope::segment, ScaleScope::row},
      {.key = "scales", .when = [](const Options& o) { return o.scales == ScaleScope::row; }});
}

/// No flag sets the law: the method does.
OptionSpec rate_law_option() {
  OptionSpec spec;
  write_in_manifest(spec, {.key = "rate_law", .when = allocates},
                    [](const Options& o) { return Json(o.coder_law ? "coder" : "4^-b"); });
  return spec;
}

/// No flag sets these: the method does.
OptionSpec chosen_by_method(const char* key, bool Options::* field) {
  OptionSpec spec;
  spec.write = [key, field](const Options& o, Json& json) {
    if (o.*field) json[key] = true;
  };
  return spec;
}

OptionSpec budget_option(OptionText text, std::optional<double> Options::* field, const char* key) {
  OptionSpec spec{.text = std::move(text), .kind = OptionKind::number};
  spec.set = [field](Options& o, const OptionValue& value) { o.*field = std::get<double>(value); };
  spec.write = [key, field](const Options& o, Json& json) {
    if (o.*field) json[key] = *(o.*field);
  };
  return spec;
}

OptionSpec budget_bits_option() {
  OptionSpec spec = budget_option(
      {"--budget-bits", kBudgets, "average code bits of all layers and sides; scales are reported beside [kvq: 2]"},
      &Options::budget_bits, "budget_bits");
  spec.numbers = {1.0, 8.0};
  return spec;
}

OptionSpec budget_bytes_option() {
  OptionSpec spec =
      budget_option({"--budget-bytes", kBudgets, "instead: bytes a token and layer in pages, scales included"},
                    &Options::budget_bytes, "budget_bytes");
  const auto store = spec.set;
  spec.set = [store](Options& o, const OptionValue& value) {
    const double bytes = std::get<double>(value);
    if (!(bytes > 0.0))
      throw Error{ErrorKind::usage, fmt::format("--budget-bytes: expected more than 0, found {}", bytes)};
    store(o, value);
  };
  return spec;
}

OptionSpec weigh_option() {
  return choice_option<Weigh>(
      {"--weigh", kBudgets,
       "what --budget-bits counts: code bits alone, or bytes in pages, one scale a row allowed [bits; kvq: bytes]"},
      &Options::weigh, {Weigh::bits, Weigh::bytes},
      {.key = "weigh", .when = [](const Options& o) { return o.budget_bits && o.weigh == Weigh::bytes; }});
}

OptionSpec target_option() {
  return choice_option<Target>(
      {"--target", kBudgets,
       "runtime: choose sizes of rows, or widths, that tuned kernels decode, where there are any and the budget fits; "
       "or free [runtime]"},
      &Options::target, {Target::runtime, Target::free},
      {.key = "target",
       .when = [](const Options& o) { return (has_budget(o) || allocates(o)) && o.target == Target::runtime; }});
}

const char* allocation_flag(Side side) { return side == Side::k ? "--k-allocation" : "--v-allocation"; }

}  // namespace

OptionSpec mixing_option() {
  return choice_option<Mixing>(
      {"--mixing", kWidths, "rotation inside a group: haar, or hadamard where it fits [haar; kvq: hadamard]"},
      &Options::mixing, {Mixing::haar, Mixing::hadamard}, {.key = "mixing", .when = allocates});
}

std::vector<OptionSpec> width_options() {
  return {
      rate_law_option(),
      chosen_by_method("choose_basis", &Options::choose_basis),
      chosen_by_method("choose_transform", &Options::choose_transform),
      score_option(),
      allocation_option("--k-allocation", "widths of keys: none, rope_block or channel (query eigenbasis) [rope_block]",
                        Sides::k, {Allocate::none, Allocate::rope_block, Allocate::channel}),
      allocation_option("--v-allocation",
                        "widths of values: none or channel (score-weighted eigenbasis) [none; kvq: channel]", Sides::v,
                        {Allocate::none, Allocate::channel}),
      integer_option({"--min-bits", kWidths, "smallest width; 0 drops channels [1]"}, &Options::min_bits, {},
                     {.key = "min_bits", .when = allocates}),
      integer_option({"--max-bits", kWidths, "largest width [8]"}, &Options::max_bits, {},
                     {.key = "max_bits", .when = allocates}),
      scales_option(),
      mixing_option(),
  };
}

std::vector<OptionSpec> budget_options() {
  return {
      budget_bits_option(),
      budget_bytes_option(),
      weigh_option(),
      target_option(),
      toggle_option({"--uniform-layout", kBudgets, "equal rows in all layers"}, &Options::uniform_layout,
                    {.key = "uniform_layout", .when = has_budget}),
      toggle_option(
          {"--budget-per-layer", kBudgets, "every layer spends the same budget, its keys and values share it"},
          &Options::budget_per_layer,
          {.key = "budget_per_layer", .when = [](const Options& o) { return o.budget_per_layer; }}),
  };
}

void settle_widths(const Method& method, Options& options, const GivenOptions& given) {
  for (const Side which : kSides) {
    SideOptions& side = options.side(which);
    if (!given.has("--transform") && !given.has(fmt::format("--transform-{}", name(which)))) continue;
    options.choose_transform = false;
    if (given.has(allocation_flag(which))) continue;
    if (side.transform == TransformKind::klt) side.allocate = Allocate::channel;
    if (side.transform == TransformKind::balanced && method.balanced_has_one_width) side.allocate = Allocate::none;
  }
  for (const Side which : kSides)
    if (options.scales == ScaleScope::row && options.side(which).rule == ScaleRule::absmax)
      throw Error{ErrorKind::usage, "--scales row: expected the scale rule norm, least_squares or rms, found absmax"};
  if (given.has("--score") && options.k.allocate != Allocate::rope_block)
    throw Error{ErrorKind::usage, "--score needs --k-allocation rope_block: it scores RoPE blocks"};
}

void settle_budget(Options& options, const GivenOptions& given) {
  if (given.has("--budget-bytes") && !given.has("--budget-bits")) options.budget_bits = std::nullopt;
  if (given.has("--weigh") && !options.budget_bits)
    throw Error{ErrorKind::usage, "--weigh needs --budget-bits: other budgets count in bytes"};
}

}  // namespace kvq
