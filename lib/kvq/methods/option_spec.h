#pragma once

#include <kvq/container/json.h>
#include <kvq/methods/options.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvq {

/// Options that a user typed, by flag. A switch that is typed as `false` is there, with that value.
class GivenOptions {
 public:
  void put(const std::string& flag, OptionValue value) { values_[flag] = std::move(value); }
  bool has(std::string_view flag) const { return values_.find(flag) != values_.end(); }
  /// Null if the flag was not typed.
  const OptionValue* find(std::string_view flag) const;
  /// The value as typed, if the flag was typed. The row of the option says which type that is.
  template <typename T>
  std::optional<T> value(std::string_view flag) const {
    const OptionValue* found = find(flag);
    return found ? std::optional<T>(std::get<T>(*found)) : std::nullopt;
  }
  bool is_on(std::string_view flag) const { return value<bool>(flag).value_or(false); }

 private:
  std::map<std::string, OptionValue, std::less<>> values_;
};

/// What a user types behind a flag: nothing, or one value.
enum class OptionKind { toggle, integer, number, text };

struct IntegerRange {
  std::int64_t lowest = std::numeric_limits<int>::min(), highest = std::numeric_limits<int>::max();
};

struct NumberRange {
  double lowest = -std::numeric_limits<double>::infinity(), highest = std::numeric_limits<double>::infinity();
};

/// One word of a closed list.
struct OptionWord {
  std::string word;
  std::string alias = {};  ///< another name for the same value, or empty
};

/// Flag, heading and help text of one option.
struct OptionText {
  std::string flag;   ///< "--sign-search"
  std::string group;  ///< heading of the flag in --help
  std::string help;
  std::string notes = {};  ///< a paragraph below all flags of --help, or empty
  std::string value = {};  ///< name of the value in help texts, such as "RATIO"; empty: by the kind of the option
};

/// One option: all that flags, help, refusals, range errors and the manifest say of it. The functions option() below
/// make the usual rows.
struct OptionSpec {
  OptionText text;
  OptionKind kind = OptionKind::text;
  std::vector<OptionWord> choices = {};  ///< text: the closed list of words; empty if the text is free
  IntegerRange integers = {};
  NumberRange numbers = {};
  std::string shown_default = {};  ///< default that --help shows behind the type, or empty
  bool every_method = false;       ///< the manifest of each method states the option, as version 1.0 did
  /// Stores a value that check_value() accepted. Empty if the method's settle() reads the option instead.
  std::function<void(Options&, const OptionValue&)> set = {};
  /// Refuses a value outside the range, in options that were not typed. @throws Error{usage}
  std::function<void(const Options&)> check = {};
  /// Adds the option to the manifest's `calibration.options`, or adds nothing.
  std::function<void(const Options&, Json&)> write = {};
};

/// Refuses a typed value outside the range or the list of choices. @throws Error{usage}
void check_value(const OptionSpec& spec, const OptionValue& value);

/// Place of a word in the choices, by its own name or its alias. @throws Error{usage} with the list of words
std::size_t choice_index(const OptionSpec& spec, const std::string& word);

/// @throws Error{usage}: `flag: expected lowest to highest, found value`
void check_range(const std::string& flag, const IntegerRange& range, std::int64_t value);

/// Name of an option in the manifest, and the condition under which the manifest states the option.
struct Manifest {
  const char* key = nullptr;               ///< null: not in the manifest
  bool (*when)(const Options&) = nullptr;  ///< null: always
  bool every_method = false;               ///< see OptionSpec
};

/// An option whose value lives in Options::own, because only the file of one method reads the value.
template <typename T>
struct OwnOption {
  const char* key;  ///< in the manifest
  T initial;

  T of(const Options& options) const {
    const auto found = options.own.find(key);
    return found == options.own.end() ? initial : static_cast<T>(std::get<Stored>(found->second));
  }
  void set(Options& options, T value) const { options.own[key] = static_cast<Stored>(value); }

  using Stored =
      std::conditional_t<std::is_same_v<T, bool>, bool,
                         std::conditional_t<std::is_floating_point_v<T>, double,
                                            std::conditional_t<std::is_same_v<T, std::string>, T, std::int64_t>>>;
};

/// Access to the value of an option: a member of Options, or an OwnOption.
template <typename T>
T get_field(const Options& options, T Options::* field) {
  return options.*field;
}
template <typename T>
T get_field(const Options& options, const OwnOption<T>& field) {
  return field.of(options);
}
template <typename T>
void set_field(Options& options, T Options::* field, T value) {
  options.*field = value;
}
template <typename T>
void set_field(Options& options, const OwnOption<T>& field, T value) {
  field.set(options, value);
}

/// Fills in OptionSpec::write for one value. @param to_json  from Options to the value in the manifest
void write_in_manifest(OptionSpec& spec, const Manifest& manifest, std::function<Json(const Options&)> to_json);

/// A switch. `field`: a bool member of Options, or an OwnOption<bool>.
template <typename Field>
OptionSpec toggle_option(OptionText text, Field field, const Manifest& manifest = {}) {
  OptionSpec spec{.text = std::move(text), .kind = OptionKind::toggle};
  spec.set = [field](Options& o, const OptionValue& value) { set_field(o, field, std::get<bool>(value)); };
  write_in_manifest(spec, manifest, [field](const Options& o) { return Json(get_field(o, field)); });
  return spec;
}

/// A whole number. `field`: an int member of Options, or an OwnOption<int>.
template <typename Field>
OptionSpec integer_option(OptionText text, Field field, IntegerRange range, const Manifest& manifest = {}) {
  OptionSpec spec{.text = std::move(text), .kind = OptionKind::integer, .integers = range};
  spec.set = [field](Options& o, const OptionValue& value) {
    set_field(o, field, static_cast<int>(std::get<std::int64_t>(value)));
  };
  spec.check = [field, range, flag = spec.text.flag](const Options& o) {
    check_range(flag, range, get_field(o, field));
  };
  write_in_manifest(spec, manifest, [field](const Options& o) { return Json(get_field(o, field)); });
  return spec;
}

/// One value of an enum with a to_string(). `field`: a member of Options, or an OwnOption.
/// @param values  in the order of the list that an error message shows
template <typename Enum, typename Field>
OptionSpec choice_option(OptionText text, Field field, const std::vector<Enum>& values, const Manifest& manifest = {}) {
  OptionSpec spec{.text = std::move(text)};
  for (const Enum value : values) spec.choices.push_back({to_string(value)});
  spec.set = [field, values, spec](Options& o, const OptionValue& word) {
    set_field(o, field, values[choice_index(spec, std::get<std::string>(word))]);
  };
  write_in_manifest(spec, manifest, [field](const Options& o) { return Json(to_string(get_field(o, field))); });
  return spec;
}

/// The sides that an option sets. Rows of one value for each side come in threes: `--clip`, `--clip-k`, `--clip-v`.
enum class Sides { k, v, kv };

using SetSide = std::function<void(SideOptions&, const OptionValue&)>;

/// What the manifest says of one side.
struct SideManifest {
  const char* key = nullptr;                           ///< null: not in the manifest
  std::function<Json(const SideOptions&)> value = {};  ///< a null value is left out
  bool every_method = false;
};

/// Completes a row that sets SideOptions.
OptionSpec side_option(OptionSpec spec, Sides sides, SetSide set, const SideManifest& manifest = {});

/// One value of an enum with a to_string(), for one side or both.
template <typename Enum>
OptionSpec side_choice(OptionText text, Sides sides, Enum SideOptions::* field, const std::vector<Enum>& values,
                       const SideManifest& manifest = {}) {
  OptionSpec spec{.text = std::move(text)};
  for (const Enum value : values) spec.choices.push_back({to_string(value)});
  const SetSide set = [field, values, spec](SideOptions& side, const OptionValue& word) {
    side.*field = values[choice_index(spec, std::get<std::string>(word))];
  };
  return side_option(std::move(spec), sides, set, manifest);
}

/// A word that names sides: none, k, v or kv.
OptionSpec named_sides(OptionText text, bool SideOptions::* field, const char* key, bool every_method);

/// Headings of --help.
namespace option_group {
inline constexpr const char* kStorage = "How rows are stored";
inline constexpr const char* kTransforms = "Transforms: coordinates that do not depend on how a model is scaled";
inline constexpr const char* kRotations = "Rotations";
inline constexpr const char* kWidths = "Mixed widths (block-gtq, kvq)";
inline constexpr const char* kBudgets = "Budgets over layers and sides (kvq; block-gtq with --joint)";
inline constexpr const char* kCentroids = "K-means residual codes (any method)";
inline constexpr const char* kRunning = "Running";
}  // namespace option_group

}  // namespace kvq
