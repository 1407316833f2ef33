#include <kvq/core/error.h>
#include <kvq/core/suggestion.h>
#include <kvq/methods/option_spec.h>

#include <fmt/format.h>

namespace kvq {

namespace {

bool covers(Sides sides, Side side) { return sides == Sides::kv || (sides == Sides::k) == (side == Side::k); }

void check_number(const std::string& flag, const NumberRange& range, double value) {
  if (!(value >= range.lowest && value <= range.highest))  // false for NaN too
    throw Error{ErrorKind::usage,
                fmt::format("{}: expected {} to {}, found {}", flag, range.lowest, range.highest, value)};
}

bool unbounded(const NumberRange& range) { return range.lowest == NumberRange{}.lowest; }

}  // namespace

const OptionValue* GivenOptions::find(std::string_view flag) const {
  const auto found = values_.find(flag);
  return found == values_.end() ? nullptr : &found->second;
}

void check_range(const std::string& flag, const IntegerRange& range, std::int64_t value) {
  if (value < range.lowest || value > range.highest)
    throw Error{ErrorKind::usage,
                fmt::format("{}: expected {} to {}, found {}", flag, range.lowest, range.highest, value)};
}

void check_value(const OptionSpec& spec, const OptionValue& value) {
  switch (spec.kind) {
    case OptionKind::toggle: return;
    case OptionKind::integer: return check_range(spec.text.flag, spec.integers, std::get<std::int64_t>(value));
    case OptionKind::number:
      if (!unbounded(spec.numbers)) check_number(spec.text.flag, spec.numbers, std::get<double>(value));
      return;
    case OptionKind::text:
      if (!spec.choices.empty()) choice_index(spec, std::get<std::string>(value));
      return;
  }
}

std::size_t choice_index(const OptionSpec& spec, const std::string& word) {
  std::vector<std::string> words;
  for (std::size_t i = 0; i < spec.choices.size(); ++i) {
    const OptionWord& choice = spec.choices[i];
    if (word == choice.word || (!choice.alias.empty() && word == choice.alias)) return i;
    words.push_back(choice.word);
  }
  throw Error{ErrorKind::usage, fmt::format("{}: unknown \"{}\"", spec.text.flag, word), hint_of_names(word, words)};
}

void write_in_manifest(OptionSpec& spec, const Manifest& manifest, std::function<Json(const Options&)> to_json) {
  if (manifest.key == nullptr) return;
  spec.every_method = manifest.every_method;
  spec.write = [manifest, to_json = std::move(to_json)](const Options& options, Json& json) {
    if (manifest.when == nullptr || manifest.when(options)) json[manifest.key] = to_json(options);
  };
}

OptionSpec side_option(OptionSpec spec, Sides sides, SetSide set, const SideManifest& manifest) {
  spec.set = [sides, set = std::move(set)](Options& options, const OptionValue& value) {
    for (const Side side : kSides)
      if (covers(sides, side)) set(options.side(side), value);
  };
  if (manifest.key == nullptr) return spec;
  spec.every_method = manifest.every_method;
  spec.write = [sides, manifest](const Options& options, Json& json) {
    for (const Side side : kSides) {
      if (!covers(sides, side)) continue;
      Json value = manifest.value(options.side(side));
      if (!value.is_null()) json[name(side)][manifest.key] = std::move(value);
    }
  };
  return spec;
}

OptionSpec named_sides(OptionText text, bool SideOptions::* field, const char* key, bool every_method) {
  OptionSpec spec{.text = std::move(text), .choices = {{"none"}, {"k"}, {"v"}, {"kv"}}};
  spec.text.value = "SIDES";
  spec = side_option(
      std::move(spec), Sides::kv, {},
      {.key = key, .value = [field](const SideOptions& s) { return Json(s.*field); }, .every_method = every_method});
  spec.set = [field](Options& options, const OptionValue& value) {
    const auto& word = std::get<std::string>(value);
    options.k.*field = word == "k" || word == "kv";
    options.v.*field = word == "v" || word == "kv";
  };
  return spec;
}

}  // namespace kvq
