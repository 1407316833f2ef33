#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvq {

/// Text of any origin for people: UTF-8 without control characters and marks that turn the writing direction, at most
/// `most` characters. Not yet escaped.
std::string readable(std::string_view text, std::size_t most = 200);
/// `text`, which is readable(), cut in its middle: a name's end tells as much as its beginning.
std::string shortened(const std::string& text, std::size_t most);
std::size_t num_characters(std::string_view text);

/// readable(), with what HTML and XML give a meaning escaped: safe inside elements and quoted attributes.
std::string html_text(std::string_view text, std::size_t most = 200);

/// Four significant digits, whole numbers as they are; a dash for NaN.
std::string html_number(double value);

using HtmlRows = std::vector<std::vector<std::string>>;
/// The first row is the header; cells are text and get escaped here. Columns marked 'l' name the line, 'r' are numbers,
/// 't' text.
std::string html_table(const HtmlRows& rows, const std::string& alignment);
/// The numbers of a chart, folded; tables of at most `most` columns, each with the leading 'l' columns: paper has no
/// scroll bar.
std::string html_numbers(const HtmlRows& rows, const std::string& alignment, std::size_t most = 14);

}  // namespace kvq
