#pragma once

#include <string>
#include <vector>

namespace kvq {

/// A table as RFC 4180 writes it: lines end with CR LF, a field with a comma, a double quote or a line break stands in
/// double quotes, and quotes inside are doubled.
/// @param rows  the first is the header; all have as many fields
std::string format_csv(const std::vector<std::vector<std::string>>& rows);

/// A number with all its digits; empty if it is NaN, "inf" or "-inf" if it is infinite.
std::string csv_number(double value);

}  // namespace kvq
