#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace kvq {

/// Columns of a terminal that help, tables and legends fit.
inline constexpr std::size_t kPageColumns = 80;

/// Breaks each line of `text` at spaces so that it has at most `columns` columns. Continuation lines begin where the
/// line's text begins: behind the last run of two or more spaces in the left half of the line, or behind its leading
/// spaces. A word longer than the line stays whole. The result ends with a line feed unless it is empty.
std::string wrap_text(std::string_view text, std::size_t columns = kPageColumns);

/// One paragraph behind a label, broken at spaces, so that no line has more than kPageColumns columns; a longer word
/// has a line of its own. Later lines are indented by the label's width. Ends with a line feed.
/// @param label  with the spaces behind it, "size    "; may be empty
std::string wrapped(const std::string& label, const std::string& text);

/// A row of a list: `term` at `indent`, `text` wrapped from `column` on. If `term` reaches into the column, the text
/// begins on the next line.
std::string list_row(std::string_view term, std::string_view text, std::size_t indent, std::size_t column);

}  // namespace kvq
