#pragma once

#include "common/tool_text.h"

#include <CLI/CLI.hpp>

#include <string>

namespace kvq {

/// The answer to -h: one screen of at most 80 columns with the flags that matter most.
std::string short_help(const CLI::App& app, const ToolText& text);

/// The answer to --help: everything, in at most 80 columns. `command`: as typed, such as "kvq-bench decode".
std::string long_help(const CLI::App& app, const ToolText& text, const std::string& command);

/// "kvq-inspect [FLAGS] ARTIFACT"
std::string usage_line(const CLI::App& app, const ToolText& text, const std::string& command);

}  // namespace kvq
