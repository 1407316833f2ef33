#include "common/flag_error.h"

#include "common/flag_facts.h"

#include <kvq/core/suggestion.h>
#include <kvq/core/text.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <regex>

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

std::optional<Error> unexpected_words(const CLI::App& app, const CLI::App& typed) {
  const std::vector<std::string> words = app.remaining(true);
  for (const std::string& word : words)
    if (word.size() > 1 && word.starts_with('-') && word != "--") return unknown_flag(typed, word);
  if (words.empty()) return std::nullopt;
  std::vector<std::string> commands;
  for (const CLI::App* command : commands_of(app)) commands.push_back(command->get_name());
  const bool is_command = &app == &typed && !commands.empty();
  return usage(fmt::format("unexpected argument {}", printable(words.front(), kShownBytes)),
               is_command ? hint_of_names(words.front(), commands) : fmt::format("see {} --help", name_of(typed)));
}

/// A message of CLI11 in the words of kvq, or as it is. The patterns are those of CLI11 2.
std::string translated(const CLI::App& app, const std::string& message) {
  static const std::regex unconverted("Could not convert: (\\S+) = ([^]*)"),
      no_value("(\\S+): \\d+ required .* missing"), repeated("(\\S+): At Most (\\d+) required but received (\\d+)");
  std::smatch parts;
  if (std::regex_match(message, parts, unconverted)) {
    const CLI::Option* option = app.get_option_no_throw(parts[1].str());
    const std::string value = option == nullptr ? "" : value_name(*option);
    return fmt::format("{}: expected {}, found {}", parts[1].str(), value == "N" ? "a whole number" : "a number",
                       printable(parts[2].str(), kShownBytes));
  }
  if (std::regex_match(message, parts, no_value)) return fmt::format("{}: the value is missing", parts[1].str());
  if (std::regex_match(message, parts, repeated))
    return fmt::format("{}: expected once, found {} values", parts[1].str(), parts[3].str());
  return message;
}

}  // namespace

Error flag_error(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& typed = typed_app(app);
  if (auto unexpected = unexpected_words(app, typed)) return *std::move(unexpected);
  const std::string hint = fmt::format("see {} --help", name_of(typed));
  static const std::string unknown_key = "INI was not able to parse ";
  const std::string message = error.what();
  if (dynamic_cast<const CLI::ConfigError*>(&error) != nullptr && message.starts_with(unknown_key)) {
    const std::string key = message.substr(unknown_key.size());
    const std::string nearest = nearest_name(key, flags_of(app));
    return usage(fmt::format("--config: unknown key {}", printable(key, kShownBytes)),
                 nearest.empty() ? hint : fmt::format("did you mean {}?", nearest));
  }
  return usage(translated(typed, message), hint);
}

}  // namespace kvq
