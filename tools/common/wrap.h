#pragma once

#include <cstddef>
#include <string>

namespace kvq {

/// Columns of a terminal that tables and legends fit.
inline constexpr std::size_t kPageColumns = 80;

/// One paragraph behind a label, broken at spaces, so that no line has more than kPageColumns columns; a longer word
/// has a line of its own. Later lines are indented by the label's width. Ends with a line feed.
/// @param label  with the spaces behind it, "size    "; may be empty
std::string wrapped(const std::string& label, const std::string& text);

}  // namespace kvq
