#pragma once

#include <CLI/CLI.hpp>

namespace kvq {

/// Lets all options with integers, also those of subcommands, take decimal numbers only: CLI11 alone reads 010 as 8 and
/// 0x10 as 16. Call it before parsing.
void require_decimal_integers(CLI::App& app);

}  // namespace kvq
