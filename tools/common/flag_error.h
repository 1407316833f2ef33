#pragma once

#include <kvq/core/error.h>

#include <CLI/CLI.hpp>

namespace kvq {

/// What CLI11 refused, in kvq's words: names the flag, says what was expected and found, and suggests the name that was
/// meant. An unknown flag is named first, whatever else is wrong, because other errors often follow from it.
Error flag_error(const CLI::App& app, const CLI::ParseError& error);

}  // namespace kvq
