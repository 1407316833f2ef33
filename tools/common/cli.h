#pragma once

#include <kvq/core/int_list.h>

#include <CLI/CLI.hpp>

#include <functional>
#include <string>
#include <vector>

namespace kvq {

/// Runs a tool's body. Prints a thrown error as one line on stderr, `<tool>: error: ...`, and `hint: ...` if the error
/// has one, and returns an exit code of core/error.h: 2 for CLI11's errors, 3 for out of memory, 1 for any other
/// exception.
int run_tool(const char* tool, CLI::App& app, int argc, char** argv, const std::function<int()>& body);

/// True if `stream_fd` is a terminal and NO_COLOR is not set. Affects only presentation.
bool wants_color(int stream_fd);

}  // namespace kvq
