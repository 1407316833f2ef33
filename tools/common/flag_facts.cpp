#include "common/flag_facts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>

namespace kvq {

namespace {

/// CLI11 names a value by its type, and appends what validators say behind a colon.
std::string plain_type(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  return type.substr(0, type.find(':'));
}

std::string argument_name(const CLI::Option& option) {
  std::string name = option.get_name(true, false);
  for (char& c : name) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

std::string help_of(const CLI::Option& option) {
  const std::string initial = option.get_default_str();
  if (initial.empty()) return option.get_description();
  const std::string shown = initial.starts_with('[') ? initial : "[" + initial + "]";
  return option.get_description() + (option.get_description().empty() ? "" : " ") + shown;
}

FlagFacts facts_of(const CLI::Option& option, const ToolText& text) {
  FlagFacts facts{
      .names = {},
      .value = value_name(option),
      .help = help_of(option),
      .group = option.get_group(),
      .words = {},
      .is_argument = option.get_positional(),
      .is_required = option.get_required(),
      .is_repeated = option.get_expected_max() > 1,
      .argument = {},
  };
  for (const std::string& name : option.get_snames()) facts.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) facts.names.push_back("--" + name);
  if (facts.is_argument) facts.argument = argument_name(option);
  if (facts.names.empty()) facts.names.push_back(facts.argument);
  for (const std::string& name : facts.names)
    if (const auto found = text.words.find(name); found != text.words.end()) facts.words = found->second;
  return facts;
}

}  // namespace

std::string FlagFacts::term() const {
  const bool is_flag = names.front().starts_with('-');
  return fmt::format("{}{}", fmt::join(names, ", "), value.empty() || !is_flag ? "" : " " + value);
}

std::string value_name(const CLI::Option& option) {
  if (option.get_expected_max() == 0 || option.get_type_size() == 0) return {};
  const std::string type = plain_type(option);
  if (type == "INT" || type == "UINT") return "N";
  if (type == "FLOAT") return "X";
  return type;
}

std::vector<FlagFacts> flag_facts(const CLI::App& app, const ToolText& text) {
  std::vector<std::string> groups = app.get_groups();
  std::stable_partition(groups.begin(), groups.end(), [](const std::string& group) { return group != kToolGroup; });
  std::vector<FlagFacts> facts;
  for (const std::string& group : groups) {
    if (group.empty()) continue;
    for (const CLI::Option* option : app.get_options())
      if (option->get_group() == group) facts.push_back(facts_of(*option, text));
  }
  return facts;
}

std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  std::vector<const CLI::App*> commands;
  for (const CLI::App* command : app.get_subcommands(nullptr))
    if (!command->get_name().empty()) commands.push_back(command);
  return commands;
}

}  // namespace kvq
