#pragma once

#include "common/tool_text.h"

#include <CLI/CLI.hpp>

#include <string>

namespace kvq {

/// Completions of a tool for a shell: its commands and flags, the words that flags choose from, files and folders.
/// The text is what the shell reads from share/bash-completion/completions, share/zsh/site-functions and
/// share/fish/vendor_completions.d.
std::string bash_completion(const CLI::App& app, const ToolText& text);
std::string zsh_completion(const CLI::App& app, const ToolText& text);
std::string fish_completion(const CLI::App& app, const ToolText& text);

}  // namespace kvq
