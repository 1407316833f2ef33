#pragma once

#include <CLI/CLI.hpp>

#include <functional>
#include <string>
#include <vector>

namespace kvq {

/// Runs a tool's body. Prints a thrown error as one line on stderr, `<tool>: error: ...`, and `hint: ...` if the error
/// has one, and returns an exit code of core/error.h: 2 for CLI11's errors, 3 for out of memory, 1 for any other
/// exception.
int run_tool(const char* tool, CLI::App& app, int argc, char** argv, const std::function<int()>& body);

/// "0-3,7" as ascending numbers. @throws Error{usage}
std::vector<int> parse_int_list(const std::string& text, const char* flag);

/// True if `stream_fd` is a terminal and NO_COLOR is not set. Affects only presentation.
bool wants_color(int stream_fd);

}  // namespace kvq
