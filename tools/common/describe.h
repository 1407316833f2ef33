#pragma once

#include "common/tool_text.h"

#include <CLI/CLI.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace kvq {

/// Where --config belongs: tools with commands have one for each command, because that is where their flags are.
enum class ConfigFlag { of_tool, of_commands };

/// Gives an app what all tools have: -h (short) and --help (long), -V and --version, --config, and the hidden flag
/// --print-page man|bash|zsh|fish, with which the build makes the files that it installs. Call it before flags and
/// subcommands are added, because subcommands inherit the help flags. `app` must outlive the parsing.
void describe(CLI::App& app, ToolText text, ConfigFlag config = ConfigFlag::of_tool);

/// A whole number between two limits, as a validator of an option. Numbers have decimal digits only: CLI11 would read
/// 010 as eight.
CLI::Validator whole_number(std::int64_t lowest, std::int64_t highest);
/// Any whole number of 64 bits.
CLI::Validator whole_number();

/// A number between two limits.
CLI::Validator number_between(double lowest, double highest);

/// One word of a list.
CLI::Validator one_of(std::vector<std::string> words);

}  // namespace kvq
