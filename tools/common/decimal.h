#pragma once

#include <CLI/CLI.hpp>

#include <string_view>

namespace kvq {

/// Whether a text is a whole number of decimal digits without leading zeros.
bool is_decimal(std::string_view text);

/// Lets all options with integers, also those of subcommands, take decimal numbers only: CLI11 alone reads 010 as 8 and
/// 0x10 as 16. Call it before parsing.
void require_decimal_integers(CLI::App& app);

}  // namespace kvq
