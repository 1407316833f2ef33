#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvq {

/// Makes any text readable: valid UTF-8 without control characters and direction marks, at most `most` characters. Does
/// not escape.
std::string readable(std::string_view text, std::size_t most = 200);
/// Cuts the middle out of `text`, which must come from readable(), because the end of a name says as much as its start.
std::string shortened(const std::string& text, std::size_t most);
std::size_t num_characters(std::string_view text);

/// readable(), then escaped for HTML and XML: safe inside elements and quoted attributes.
std::string html_text(std::string_view text, std::size_t most = 200);

/// Four significant digits; whole numbers without a point; a dash for NaN.
std::string html_number(double value);

using HtmlRows = std::vector<std::vector<std::string>>;
/// The first row is the header. html_table() escapes the cells, which are text. Alignment: 'l' names the line, 'r' is a
/// number, 't' is text.
std::string html_table(const HtmlRows& rows, const std::string& alignment);
/// The numbers of a chart, folded. A wide table is split into tables of at most `most` columns, each with the leading
/// 'l' columns, because paper has no scroll bar.
std::string html_numbers(const HtmlRows& rows, const std::string& alignment, std::size_t most = 14);

}  // namespace kvq
