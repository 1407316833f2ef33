#pragma once

#include <CLI/CLI.hpp>

#include <functional>
#include <string>
#include <vector>

namespace kvq {

/// Runs a tool's body and turns what it throws into one line on stderr, `<tool>: error: ...`, perhaps a `hint: ...`,
/// and an exit code of core/error.h. CLI11's own errors become 2, out of memory 3, anything unknown 1.
int run_tool(const char* tool, CLI::App& app, int argc, char** argv, const std::function<int()>& body);

/// "0-3,7" as ascending numbers. @throws Error{usage}
std::vector<int> parse_int_list(const std::string& text, const char* flag);

/// True if `stream_fd` is a terminal and NO_COLOR is not set: presentation only, never a result.
bool wants_color(int stream_fd);

}  // namespace kvq
