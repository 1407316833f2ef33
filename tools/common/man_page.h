#pragma once

#include "common/tool_text.h"

#include <CLI/CLI.hpp>

#include <string>

namespace kvq {

/// The manual page of a tool, section 1, in roff with the man macros.
std::string man_page(const CLI::App& app, const ToolText& text);

}  // namespace kvq
