#include "common/flag_error.h"

#include "common/flag_facts.h"

#include <kvq/core/suggestion.h>
#include <kvq/core/text.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

namespace kvq {

namespace {

constexpr std::size_t kShownBytes = 80;  // of a word that a user typed

Error usage(const std::string& message, std::string hint) { return {ErrorKind::usage, message, std::move(hint)}; }

/// The subcommand that was typed, else the app itself.
const CLI::App& typed_app(const CLI::App& app) {
  const auto commands = app.get_subcommands();
  return commands.empty() ? app : *commands.back();
}

std::string name_of(const CLI::App& app) {
  return app.get_parent() == nullptr ? app.get_name() : app.get_parent()->get_name() + " " + app.get_name();
}

std::vector<std::string> flags_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;
    for (const std::string& name : option->get_lnames()) names.push_back(name);
    for (const std::string& name : option->get_snames()) names.push_back(name);
  }
  return names;
}

std::string with_dashes(const std::string& name) { return (name.size() == 1 ? "-" : "--") + name; }

/// Names of subcommands that have the flag, because it was typed before the subcommand or in another one.
std::vector<std::string> owners_of(const CLI::App& app, const std::string& flag) {
  const CLI::App& top = app.get_parent() == nullptr ? app : *app.get_parent();
  std::vector<std::string> owners;
  for (const CLI::App* command : commands_of(top))
    if (command != &app && command->get_option_no_throw(flag) != nullptr) owners.push_back(name_of(*command));
  return owners;
}

Error unknown_flag(const CLI::App& app, const std::string& word) {
  const std::string flag = word.substr(0, word.find('='));
  const std::string bare = flag.substr(std::min(flag.find_first_not_of('-'), flag.size()));
  const std::string message = fmt::format("unknown flag {}", printable(flag, kShownBytes));
  if (const auto owners = owners_of(app, flag); !owners.empty())
    return usage(message + " of " + name_of(app), fmt::format("it belongs to {}", fmt::join(owners, ", ")));
  const std::string nearest = nearest_name(bare, flags_of(app));
  return usage(message, nearest.empty() ? fmt::format("see {} --help", name_of(app))
                                        : fmt::format("did you mean {}?", with_dashes(nearest)));
}

/// The error about words that an app did not expect: the first flag among them, else the first word.
std::optional<Error> unexpected_words(const CLI::App& app) {
  const std::vector<std::string> words = app.remaining();
  for (const std::string& word : words)
    if (word.size() > 1 && word.starts_with('-') && word != "--") return unknown_flag(app, word);
  if (words.empty()) return std::nullopt;
  std::vector<std::string> commands;
  for (const CLI::App* command : commands_of(app)) commands.push_back(command->get_name());
  return usage(fmt::format("unexpected argument {}", printable(words.front(), kShownBytes)),
               commands.empty() ? fmt::format("see {} --help", name_of(app)) : hint_of_names(words.front(), commands));
}

/// What stands between two texts, or nothing if `text` has not both in this order. An empty `end` means the end.
std::optional<std::string> between(const std::string& text, std::string_view start, std::string_view end) {
  const std::size_t at = text.find(start);
  if (at == std::string::npos) return std::nullopt;
  const std::size_t first = at + start.size(), last = end.empty() ? text.size() : text.find(end, first);
  return last == std::string::npos ? std::nullopt : std::optional(text.substr(first, last - first));
}

/// A message of CLI11 in the words of kvq, or as it is. The patterns are those of CLI11 2. No regular expressions: they
/// take stack in proportion to the text, which a user chooses.
std::string translated(const CLI::App& app, const std::string& message) {
  static const std::string unconverted = "Could not convert: ";
  if (message.starts_with(unconverted)) {
    const std::string name = between(message, unconverted, " = ").value_or("");
    const CLI::Option* option = app.get_option_no_throw(name);
    const bool is_whole = option != nullptr && value_name(*option) == "N";
    return fmt::format("{}: expected {}, found {}", name, is_whole ? "a whole number" : "a number",
                       printable(between(message, " = ", "").value_or(""), kShownBytes));
  }
  const std::string name = message.substr(0, message.find(':'));
  if (message.ends_with(" missing") && between(message, " required ", "")) return name + ": the value is missing";
  if (const auto count = between(message, " required but received ", ""); count && between(message, ": At Most ", " "))
    return fmt::format("{}: expected once, found {} values", name, *count);
  return message;
}

}  // namespace

Error flag_error(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& typed = typed_app(app);
  for (const CLI::App* place : {&app, &typed})
    if (auto unexpected = unexpected_words(*place)) return *std::move(unexpected);
  const std::string hint = fmt::format("see {} --help", name_of(typed));
  return usage(translated(typed, error.what()), hint);
}

}  // namespace kvq
