#include "common/completion.h"

#include "common/flag_facts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace kvq {

namespace {

/// A shell function's name: "_kvq_eval".
std::string function_name(const ToolText& text) {
  std::string name = "_" + text.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

/// Text inside single quotes of a shell.
std::string quoted(std::string text) {
  for (std::size_t at = 0; (at = text.find('\'', at)) != std::string::npos; at += 4) text.replace(at, 1, "'\\''");
  return "'" + text + "'";
}

/// Puts a backslash before each of `marks`.
std::string escaped(const std::string& text, std::string_view marks) {
  std::string result;
  for (const char c : text) {
    if (marks.find(c) != std::string_view::npos) result += '\\';
    result += c;
  }
  return result;
}

std::vector<std::string> names_of(const std::vector<FlagFacts>& flags) {
  std::vector<std::string> names;
  for (const FlagFacts& flag : flags)
    for (const std::string& name : flag.names)
      if (name.starts_with('-')) names.push_back(name);
  return names;
}

std::vector<std::string> names_of(const std::vector<const CLI::App*>& commands) {
  std::vector<std::string> names;
  for (const CLI::App* command : commands) names.push_back(command->get_name());
  return names;
}

bool takes_files(const std::vector<FlagFacts>& flags) {
  return std::any_of(flags.begin(), flags.end(), [](const FlagFacts& flag) { return flag.is_argument; });
}

// bash

std::string bash_words(const std::vector<std::string>& words) {
  return fmt::format("mapfile -t COMPREPLY < <(compgen -W {} -- \"$word\")",
                     quoted(fmt::format("{}", fmt::join(words, " "))));
}

std::string bash_value(const FlagFacts& flag) {
  if (!flag.words.empty()) return bash_words(flag.words);
  if (flag.value == "FOLDER") return "mapfile -t COMPREPLY < <(compgen -d -- \"$word\")";
  if (flag.value == "FILE") return "mapfile -t COMPREPLY < <(compgen -f -- \"$word\")";
  return ":";
}

/// The branch of one command: values of the flag before the word, else flags, else files.
std::string bash_branch(const std::vector<FlagFacts>& flags, const std::string& rest) {
  std::string cases;
  for (const FlagFacts& flag : flags)
    if (!flag.value.empty() && flag.names.front().starts_with('-'))
      cases += fmt::format("    {}) {}; return ;;\n", fmt::join(flag.names, "|"), bash_value(flag));
  return fmt::format(
      "  case $before in\n{}  esac\n"
      "  case $word in\n    -*) {} ;;\n    *) {} ;;\n  esac\n",
      cases, bash_words(names_of(flags)), rest);
}

}  // namespace

std::string bash_completion(const CLI::App& app, const ToolText& text) {
  const std::string function = function_name(text), files = "mapfile -t COMPREPLY < <(compgen -f -- \"$word\")";
  const std::vector<FlagFacts> flags = flag_facts(app, text);
  const std::vector<const CLI::App*> commands = commands_of(app);
  std::string script = fmt::format(
      "# bash completion of {}, generated from its flags\n"
      "{}() {{\n"
      "  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}}\n"
      "  COMPREPLY=()\n"
      "  # --flag=value comes as three words\n"
      "  if [ \"$word\" = \"=\" ]; then word=\n"
      "  elif [ \"$before\" = \"=\" ]; then before=${{COMP_WORDS[COMP_CWORD - 2]}}\n"
      "  fi\n",
      text.name, function);
  if (!commands.empty()) {
    script += "  local command=${COMP_WORDS[1]}\n  [ \"$COMP_CWORD\" -gt 1 ] || command=\n  case $command in\n";
    for (const CLI::App* command : commands)
      script +=
          fmt::format("  {})\n{}  return ;;\n", command->get_name(), bash_branch(flag_facts(*command, text), ":"));
    script += "  esac\n";
  }
  script += bash_branch(flags, !commands.empty() ? bash_words(names_of(commands)) : takes_files(flags) ? files : ":");
  return script + fmt::format("}}\ncomplete -o filenames -F {} {}\n", function, text.name);
}

namespace {

// zsh

/// Text of a flag between the brackets of _arguments.
std::string zsh_text(const std::string& text) { return escaped(text, "\\[]:"); }

std::string zsh_action(const FlagFacts& flag) {
  if (!flag.words.empty()) return fmt::format("({})", fmt::join(flag.words, " "));
  if (flag.value == "FOLDER") return "_files -/";
  return flag.value == "FILE" ? "_files" : " ";
}

std::string zsh_flag(const FlagFacts& flag) {
  const std::string value = flag.value.empty() ? "" : fmt::format(":{}:{}", flag.value, zsh_action(flag));
  std::string lines;
  for (const std::string& name : flag.names)
    lines += fmt::format("    {} \\\n", quoted(fmt::format("*{}[{}]{}", name, zsh_text(flag.help), value)));
  return lines;
}

std::string zsh_flags(const std::vector<FlagFacts>& flags) {
  std::string lines;
  for (const FlagFacts& flag : flags) {
    if (flag.names.front().starts_with('-')) lines += zsh_flag(flag);
    if (flag.is_argument)
      lines +=
          fmt::format("    {} \\\n", quoted(fmt::format("{}:{}:_files", flag.is_repeated ? "*" : "", flag.argument)));
  }
  return lines;
}

}  // namespace

std::string zsh_completion(const CLI::App& app, const ToolText& text) {
  const std::vector<const CLI::App*> commands = commands_of(app);
  std::string script = fmt::format("#compdef {}\n# generated from the flags of {}\n", text.name, text.name);
  if (commands.empty()) return script + "_arguments -s \\\n" + zsh_flags(flag_facts(app, text)) + "    && return\n";
  script += "local state line\n_arguments -C \\\n" + zsh_flags(flag_facts(app, text)) +
            fmt::format("    '1:command:({})' '*::flag:->flags' && return\n", fmt::join(names_of(commands), " ")) +
            "case $line[1] in\n";
  for (const CLI::App* command : commands)
    script += fmt::format("  {})\n    _arguments -s \\\n{}      && return ;;\n", command->get_name(),
                          zsh_flags(flag_facts(*command, text)));
  return script + "esac\n";
}

namespace {

// fish

std::string fish_quoted(const std::string& text) { return "'" + escaped(text, "\\'") + "'"; }

std::string fish_flag(const FlagFacts& flag, const std::string& start) {
  std::string line = start;
  for (const std::string& name : flag.names)
    line += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
  if (!flag.words.empty())
    line += fmt::format(" -x -a {}", fish_quoted(fmt::format("{}", fmt::join(flag.words, " "))));
  else if (flag.takes_file())
    line += " -r -F";
  else if (!flag.value.empty())
    line += " -x";
  return line + fmt::format(" -d {}\n", fish_quoted(flag.help));
}

std::string fish_flags(const std::vector<FlagFacts>& flags, const std::string& start) {
  std::string lines;
  for (const FlagFacts& flag : flags)
    if (flag.names.front().starts_with('-')) lines += fish_flag(flag, start);
  return lines;
}

}  // namespace

std::string fish_completion(const CLI::App& app, const ToolText& text) {
  const std::vector<FlagFacts> flags = flag_facts(app, text);
  const std::string start = "complete -c " + text.name;
  std::string script = fmt::format("# fish completion of {}, generated from its flags\n", text.name);
  if (!takes_files(flags)) script += start + " -f\n";
  script += fish_flags(flags, start);
  for (const CLI::App* command : commands_of(app)) {
    script += fmt::format("{} -n __fish_use_subcommand -a {} -d {}\n", start, command->get_name(),
                          fish_quoted(command->get_description()));
    script += fish_flags(flag_facts(*command, text),
                         fmt::format("{} -n '__fish_seen_subcommand_from {}'", start, command->get_name()));
  }
  return script;
}

}  // namespace kvq
