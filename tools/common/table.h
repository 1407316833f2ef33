#pragma once

#include <string>
#include <vector>

namespace kvq {

/// Formats a text table whose first row is the header. Columns marked 'l' are left-aligned, all others right-aligned.
std::string format_table(const std::vector<std::vector<std::string>>& rows, const std::string& alignment);
/// Width of the table's widest line, spaces at its end included.
std::size_t table_width(const std::vector<std::vector<std::string>>& rows);

/// Width of a text on a terminal: a UTF-8 sequence counts once, a color sequence not at all.
std::size_t width_of(const std::string& text);

/// Decimal units: "1.5 MB", "812 bytes".
std::string format_bytes(double bytes);
/// 0.0312 as "+3.12%", a relative excess; never "-0.00%".
std::string format_excess(double ratio, int digits);
/// "3.2 s", "12 min".
std::string format_seconds(double seconds);

}  // namespace kvq
