#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <string_view>

namespace kvq {

/// Whether a text is a whole number of decimal digits without leading zeros.
bool is_decimal(std::string_view text);

/// Why a text is no such number: "expected ..., found ..."; empty if it is one.
std::string decimal_fault(std::string_view text);

/// Whether a text would be such a number without its leading zeros.
bool has_leading_zeros(std::string_view text);

/// Lets all options with integers, also those of subcommands, take decimal numbers only: CLI11 alone reads 010 as 8 and
/// 0x10 as 16. Call it before parsing.
void require_decimal_integers(CLI::App& app);

}  // namespace kvq
