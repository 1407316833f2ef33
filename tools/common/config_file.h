#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <string_view>
#include <vector>

/// Flags from a file. An error names file and line and never quotes the file, because `--config` may name any file by
/// mistake, also one with secrets.
namespace kvq {

/// `name = value` or `name = [value, value]`.
struct ConfigEntry {
  int line = 0;      ///< of the name, from 1
  std::string name;  ///< without leading dashes
  std::vector<std::string> values;
};

/// Parses the subset of TOML that flags need: `name = value` lines, comments behind `#` (or `;` at the start of a
/// line), values that are bare words, numbers, "strings" with escapes, 'strings' without, or [lists] of these, which
/// may span lines. No sections.
/// @param name  of the file, for errors
/// @throws Error{bad_input} naming file and line
std::vector<ConfigEntry> parse_config(std::string_view text, const std::string& name);

/// parse_config() of a regular file of at most 1 MiB.
/// @throws Error{io} if the file cannot be opened or is no regular file, Error{bad_input} if it is too large or
/// malformed
std::vector<ConfigEntry> read_config_file(const std::string& path);

/// Adds `--config FILE` to a tool or subcommand: an entry counts as the flag of its name, and a flag on the command
/// line wins. Parsing throws Error{usage} naming file and line if there is no such flag or if the flag does not take
/// the value.
CLI::Option* add_config_flag(CLI::App& app);

}  // namespace kvq
