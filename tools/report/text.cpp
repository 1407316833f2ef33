#include "report/text.h"

#include <kvq/core/text.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

constexpr std::string_view kEllipsis = "…", kReplacement = "\xef\xbf\xbd";
constexpr std::size_t kLongName = 28;  ///< longer names wrap inside a table

/// Number of bytes of the first UTF-8 sequence of `text`, which must be valid UTF-8.
std::size_t first_bytes(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  return lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}

bool between(std::string_view c, std::string_view first, std::string_view last) { return c >= first && c <= last; }

/// Control characters, marks without width or for writing direction, and characters that XML forbids.
bool is_invisible(std::string_view c) {
  switch (c.size()) {
    case 1: return c < " " || c == "\x7f";
    case 2: return c < "\xc2\xa0" || c == "\xd8\x9c";
    case 3:
      return between(c, "\xe2\x80\x8b", "\xe2\x80\x8f") || between(c, "\xe2\x80\xa8", "\xe2\x80\xae") ||
             between(c, "\xe2\x81\xa0", "\xe2\x81\xaf") || c == "\xef\xbb\xbf" || c >= "\xef\xbf\xbe";
    default: return false;
  }
}

std::string escaped(std::string_view text) {
  std::string html;
  for (const char c : text) {
    switch (c) {
      case '&': html += "&amp;"; break;
      case '<': html += "&lt;"; break;
      case '>': html += "&gt;"; break;
      case '"': html += "&quot;"; break;
      case '\'': html += "&#39;"; break;
      default: html += c;
    }
  }
  return html;
}

/// Allows a line break after each underscore, so that names do not widen a column beyond its numbers.
std::string breakable(const std::string& html) {
  std::string result;
  for (const char c : html) {
    result += c;
    if (c == '_') result += "<wbr>";
  }
  return result;
}

std::string row_html(const std::vector<std::string>& row, const std::string& alignment, bool header) {
  std::string html = "<tr>";
  for (std::size_t c = 0; c < row.size(); ++c) {
    const std::string text = html_text(row[c]);
    if (header) {
      html += fmt::format("<th scope=\"col\"{}>{}</th>", alignment[c] == 'r' ? " class=\"n\"" : "", breakable(text));
    } else if (alignment[c] == 'l') {
      html +=
          fmt::format("<th scope=\"row\"{}>{}</th>", num_characters(row[c]) > kLongName ? " class=\"long\"" : "", text);
    } else {
      html += fmt::format("<td{}>{}</td>", alignment[c] == 'r' ? " class=\"n\"" : "", text);
    }
  }
  return html + "</tr>\n";
}

}  // namespace

std::string readable(std::string_view text, std::size_t most) {
  const std::string plain = is_utf8(text) ? std::string() : printable(text, most);
  if (!plain.empty()) text = plain;
  std::string result;
  for (std::size_t count = 0; !text.empty(); ++count) {
    if (count == most) return result + std::string(kEllipsis);
    const std::string_view character = text.substr(0, first_bytes(text));
    result += is_invisible(character) ? kReplacement : character;
    text.remove_prefix(character.size());
  }
  return result;
}

std::size_t num_characters(std::string_view text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

std::string shortened(const std::string& text, std::size_t most) {
  std::vector<std::string_view> characters;
  for (std::string_view rest = text; !rest.empty(); rest.remove_prefix(characters.back().size()))
    characters.push_back(rest.substr(0, first_bytes(rest)));
  if (characters.size() <= most) return text;
  std::string result;
  const std::size_t head = (most - 1) / 2, tail = most - 1 - head;
  for (std::size_t i = 0; i < head; ++i) result += characters[i];
  result += kEllipsis;
  for (std::size_t i = characters.size() - tail; i < characters.size(); ++i) result += characters[i];
  return result;
}

std::string html_text(std::string_view text, std::size_t most) { return escaped(readable(text, most)); }

std::string html_number(double value) {
  if (std::isnan(value)) return "–";
  if (value == std::round(value) && std::abs(value) < 1e9) return fmt::format("{:.0f}", value);
  std::string text = fmt::format("{:#.4g}", value);
  if (const std::size_t e = text.find("e-0"); e != text.npos) text.erase(e + 2, 1);
  return text;
}

std::string html_table(const HtmlRows& rows, const std::string& alignment) {
  std::string html = "<div class=\"scroll\" role=\"region\" aria-label=\"table\" tabindex=\"0\"><table>\n<thead>" +
                     row_html(rows.front(), alignment, true) + "</thead>\n<tbody>\n";
  for (std::size_t r = 1; r < rows.size(); ++r) html += row_html(rows[r], alignment, false);
  return html + "</tbody></table></div>\n";
}

std::string html_numbers(const HtmlRows& rows, const std::string& alignment, std::size_t most) {
  const std::size_t names = std::min(alignment.find_first_not_of('l'), alignment.size());
  std::string html = "<details><summary>Numbers</summary>\n";
  for (std::size_t begin = names; begin < alignment.size(); begin += most) {
    const std::size_t count = std::min(most, alignment.size() - begin);
    const auto part = [&](const auto& line) {
      auto own = line;
      own.erase(own.begin() + static_cast<std::ptrdiff_t>(begin + count), own.end());
      own.erase(own.begin() + static_cast<std::ptrdiff_t>(names), own.begin() + static_cast<std::ptrdiff_t>(begin));
      return own;
    };
    HtmlRows block;
    for (const auto& row : rows) block.push_back(part(row));
    html += html_table(block, part(alignment));
  }
  return html + "</details>\n";
}

}  // namespace kvq
