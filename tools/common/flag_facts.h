#pragma once

#include "common/tool_text.h"

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace kvq {

/// What help texts, manual pages and completions say of one flag or argument.
struct FlagFacts {
  std::vector<std::string> names;  ///< "-m", "--model"; of an argument without a flag: "ARTIFACT"
  std::string value;               ///< "FILE"; empty for a switch
  std::string help;                ///< with the default in brackets
  std::string group;               ///< heading
  std::vector<std::string> words;  ///< values to choose from, or empty
  bool is_argument = false;        ///< is (also) typed without a flag
  bool is_required = false;
  bool is_repeated = false;  ///< an argument that takes several values
  std::string argument;      ///< name of the argument on the usage line, "ARTIFACT"

  /// "-m, --model FILE"
  std::string term() const;
  bool takes_file() const { return value == "FILE" || value == "FOLDER"; }
};

/// Flags of an app in the order of its groups, with flags about the tool itself last. Hidden flags are left out.
std::vector<FlagFacts> flag_facts(const CLI::App& app, const ToolText& text);

/// Name of the value of an option for people: "N", "FILE"; empty for a switch.
std::string value_name(const CLI::Option& option);

/// Heading of --help, --version and --config.
inline constexpr const char* kToolGroup = "This tool";

/// Named subcommands, in the order of their definition.
std::vector<const CLI::App*> commands_of(const CLI::App& app);

}  // namespace kvq
