#pragma once

#include <string>
#include <vector>

namespace kvq {

/// A text table for people: the first row is the header. Columns marked 'l' are left-aligned, others right-aligned.
std::string format_table(const std::vector<std::vector<std::string>>& rows, const std::string& alignment);
/// Characters of its widest line, before spaces at the end are dropped.
std::size_t table_width(const std::vector<std::vector<std::string>>& rows);

/// Characters that a text takes on a terminal: UTF-8 sequences count once, colours not at all.
std::size_t width_of(const std::string& text);

/// "1.5 MB", "812 bytes": decimal units.
std::string format_bytes(double bytes);
/// 0.0312 as "+3.12%": how much more, never "-0.00%".
std::string format_excess(double ratio, int digits);
/// "3.2 s", "12 min".
std::string format_seconds(double seconds);

}  // namespace kvq
