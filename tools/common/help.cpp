#include "common/help.h"

#include "common/flag_facts.h"
#include "common/text_wrap.h"

#include <kvq/core/exit_code.h>

#include <fmt/format.h>

#include <algorithm>

namespace kvq {

namespace {

constexpr std::size_t kHelpColumn = 26;  // where texts of flags begin

std::string flag_row(const FlagFacts& flag) { return list_row(flag.term(), flag.help, 2, kHelpColumn); }

/// Arguments that are not flags as well.
bool is_plain_argument(const FlagFacts& flag) { return !flag.names.front().starts_with('-'); }

std::string argument_list(const std::vector<FlagFacts>& flags) {
  std::string list;
  for (const FlagFacts& flag : flags)
    if (is_plain_argument(flag)) list += flag_row(flag);
  return list.empty() ? list : "\nArguments:\n" + list;
}

std::string flag_groups(const std::vector<FlagFacts>& flags) {
  std::string list, group;
  for (const FlagFacts& flag : flags) {
    if (is_plain_argument(flag)) continue;
    if (flag.group != group) list += "\n" + wrap_text((flag.group == "Options" ? "Flags" : flag.group) + ":");
    group = flag.group;
    list += flag_row(flag);
  }
  return list;
}

std::string command_list(const CLI::App& app) {
  std::string list;
  for (const CLI::App* command : commands_of(app))
    list += list_row(command->get_name(), command->get_description(), 2, kHelpColumn);
  return list.empty() ? list : "\nCommands:\n" + list;
}

/// Effects stand beside the commands if all of them fit, else below.
std::string example_list(const std::vector<ToolExample>& examples) {
  std::size_t widest = 0;
  for (const ToolExample& example : examples) widest = std::max(widest, example.command.size());
  const bool beside = std::all_of(examples.begin(), examples.end(), [&](const ToolExample& example) {
    return 2 + widest + 2 + example.effect.size() <= kPageColumns;
  });
  std::string list;
  for (const ToolExample& example : examples)
    list += beside ? fmt::format("  {:<{}}  {}\n", example.command, widest, example.effect)
                   : fmt::format("  {}\n", example.command) + wrap_text("      " + example.effect);
  return list.empty() ? list : "\nExamples:\n" + list;
}

std::string section_list(const std::vector<TextSection>& sections) {
  std::string list;
  for (const TextSection& section : sections)
    list += "\n" + (section.title.empty() ? "" : wrap_text(section.title + ":")) + wrap_text(section.text);
  return list;
}

std::string exit_code_list() {
  std::string list;
  for (const ExitCodeRow& row : exit_codes()) list += list_row(std::to_string(to_int(row.code)), row.meaning, 2, 7);
  return "\nExit codes:\n" + list;
}

}  // namespace

std::string usage_line(const CLI::App& app, const ToolText& text, const std::string& command) {
  std::string line = command;
  if (!commands_of(app).empty()) line += " COMMAND";
  line += " [FLAGS]";
  for (const FlagFacts& flag : flag_facts(app, text)) {
    if (!flag.is_argument) continue;
    const std::string name = flag.argument + (flag.is_repeated ? "..." : "");
    line += flag.is_required ? " " + name : " [" + name + "]";
  }
  return line;
}

std::string short_help(const CLI::App& app, const ToolText& text) {
  std::string help = wrap_text(fmt::format("{}: {}", text.name, text.summary)) + "\n" +
                     wrap_text("Usage:  " + usage_line(app, text, text.name));
  const std::vector<FlagFacts> flags = flag_facts(app, text);
  help += argument_list(flags) + command_list(app);
  std::string list;
  for (const std::string& name : text.first_flags)
    for (const FlagFacts& flag : flags)
      if (std::find(flag.names.begin(), flag.names.end(), name) != flag.names.end()) list += flag_row(flag);
  if (!list.empty()) help += "\nFlags that most runs need:\n" + list;
  help += section_list(text.short_sections);
  return help + "\n" +
         wrap_text(fmt::format("{0} --help has all {1} flags, examples and exit codes; man {0} has the same.",
                               text.name, flags.size()));
}

std::string long_help(const CLI::App& app, const ToolText& text, const std::string& command) {
  const bool is_tool = app.get_parent() == nullptr;
  const std::vector<FlagFacts> flags = flag_facts(app, text);
  std::string help = is_tool ? wrap_text(fmt::format("{}: {}", text.name, text.summary))
                             : wrap_text(fmt::format("{}: {}", command, app.get_description()));
  help += "\n" + wrap_text("Usage:  " + usage_line(app, text, command));
  if (is_tool) help += "\n" + wrap_text(text.description) + example_list(text.examples);
  help += argument_list(flags) + command_list(app) + flag_groups(flags);
  if (!is_tool) return help + (app.get_footer().empty() ? "" : "\n" + wrap_text(app.get_footer()));
  return help + section_list(text.sections) + exit_code_list();
}

}  // namespace kvq
