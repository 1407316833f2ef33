#include "common/text_wrap.h"

#include "common/table.h"

#include <algorithm>
#include <sstream>

namespace kvq {

namespace {

/// Where the text of a line begins, which is also where its continuation lines begin.
std::size_t hanging_indent(std::string_view line, std::size_t columns) {
  const std::size_t half = std::min(columns / 2, line.size() - 1);
  for (std::size_t end = half; end >= 2; --end)
    if (line[end] != ' ' && line[end - 1] == ' ' && line[end - 2] == ' ') return end;
  return line.find_first_not_of(' ');
}

/// The words of `text` behind `start`, in lines of at most `columns`; later lines are indented as far as `start` is
/// wide.
std::string fill(const std::string& start, const std::string& text, std::size_t columns) {
  const std::string indent(width_of(start), ' ');
  std::istringstream words(text);
  std::string all, line = start;
  bool is_empty = true;  // no word behind the start or the indent
  for (std::string word; words >> word;) {
    if (!is_empty && width_of(line) + 1 + width_of(word) > columns) {
      all += line + "\n";
      line = indent;
      is_empty = true;
    }
    line += (is_empty ? "" : " ") + word;
    is_empty = false;
  }
  return all + line + "\n";
}

std::string wrap_line(const std::string& line, std::size_t columns) {
  if (width_of(line) <= columns) return line + "\n";
  const std::size_t indent = hanging_indent(line, columns);
  return fill(line.substr(0, indent), line.substr(indent), columns);
}

}  // namespace

std::string wrap_text(std::string_view text, std::size_t columns) {
  std::string wrapped;
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) wrapped += wrap_line(line, columns);
  return wrapped;
}

std::string wrapped(const std::string& label, const std::string& text) { return fill(label, text, kPageColumns); }

std::string list_row(std::string_view term, std::string_view text, std::size_t indent, std::size_t column) {
  const std::string start = std::string(indent, ' ') + std::string(term);
  if (text.empty()) return start + "\n";
  const std::string rest = wrapped(std::string(column, ' '), std::string(text));
  return start.size() + 2 <= column ? start + rest.substr(start.size()) : start + "\n" + rest;
}

}  // namespace kvq
