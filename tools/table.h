#pragma once

#include <string>
#include <vector>

namespace kvq {

/// A text table for people: the first row is the header. Columns marked 'l' are left-aligned, others right-aligned.
/// Widths count characters, not bytes.
std::string format_table(const std::vector<std::vector<std::string>>& rows, const std::string& alignment);

/// "1.5 MB", "812 bytes": decimal units.
std::string format_bytes(double bytes);
/// "3.2 s", "12 min".
std::string format_seconds(double seconds);

}  // namespace kvq
