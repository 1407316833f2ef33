#include "common/text_wrap.h"

#include <sstream>

namespace kvq {

namespace {

/// Where the text of a line begins, which is also where its continuation lines begin.
std::size_t hanging_indent(std::string_view line, std::size_t columns) {
  const std::size_t first = line.find_first_not_of(' ');
  const std::size_t gap = line.find("  ", first);
  const std::size_t second = gap == std::string_view::npos ? gap : line.find_first_not_of(' ', gap);
  return second == std::string_view::npos || second > columns / 2 ? first : second;
}

std::string wrap_line(const std::string& line, std::size_t columns) {
  if (line.size() <= columns) return line + "\n";
  const std::size_t indent = hanging_indent(line, columns);
  std::string wrapped, row = line.substr(0, indent);
  bool is_empty = true;
  std::istringstream words(line.substr(indent));
  for (std::string word; words >> word;) {
    if (!is_empty && row.size() + 1 + word.size() > columns) {
      wrapped += row + "\n";
      row.assign(indent, ' ');
      is_empty = true;
    }
    row += (is_empty ? "" : " ") + word;
    is_empty = false;
  }
  return wrapped + row + "\n";
}

}  // namespace

std::string wrap_text(std::string_view text, std::size_t columns) {
  std::string wrapped;
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) wrapped += wrap_line(line, columns);
  return wrapped;
}

std::string list_row(std::string_view term, std::string_view text, std::size_t indent, std::size_t column) {
  const std::string start = std::string(indent, ' ') + std::string(term);
  if (text.empty()) return start + "\n";
  const std::string rest = wrap_line(std::string(column, ' ') + std::string(text), kHelpColumns);
  return start.size() + 2 <= column ? start + rest.substr(start.size()) : start + "\n" + rest;
}

}  // namespace kvq
