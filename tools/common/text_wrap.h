#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace kvq {

inline constexpr std::size_t kHelpColumns = 80;

/// Breaks each line of `text` at spaces so that it has at most `columns` characters. Continuation lines begin where
/// the line's text begins: behind its leading spaces, or behind the first run of two or more spaces inside the line.
/// A word longer than the line stays whole. The result ends with a line feed unless it is empty.
std::string wrap_text(std::string_view text, std::size_t columns = kHelpColumns);

/// A row of a list: `term` at `indent`, `text` wrapped from `column` on. If `term` reaches into the column, the text
/// begins on the next line.
std::string list_row(std::string_view term, std::string_view text, std::size_t indent, std::size_t column);

}  // namespace kvq
