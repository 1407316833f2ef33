#include <kvq/core/text.h>

#include <cstdint>
#include <optional>

namespace kvq {
namespace {

/// Bytes of the UTF-8 character that a byte begins; 1 for a byte that begins none.
std::size_t character_bytes(char lead) {
  const auto byte = static_cast<unsigned char>(lead);
  return byte >= 0xf0 && byte <= 0xf4 ? 4 : byte >= 0xe0 && byte <= 0xef ? 3 : byte >= 0xc2 && byte <= 0xdf ? 2 : 1;
}

/// The code point of a well-formed character of two bytes or more.
std::uint32_t code_point(std::string_view character) {
  std::uint32_t point = static_cast<unsigned char>(character[0]) & (0xffu >> (character.size() + 1));
  for (const char c : character.substr(1)) point = (point << 6) | (static_cast<unsigned char>(c) & 0x3fu);
  return point;
}

/// Whether a terminal acts on a character beyond ASCII, or shows other text than there is.
bool is_acted_on(std::uint32_t point) {
  return (point >= 0x80 && point <= 0x9f) || point == 0x61c || point == 0x200e || point == 0x200f ||
         (point >= 0x2028 && point <= 0x202e) || (point >= 0x2066 && point <= 0x2069) || point == 0xfeff;
}

std::string escaped(std::uint32_t point) { return fmt::format("\\u{:04x}", point); }
std::string escaped_byte(char byte) { return fmt::format("\\x{:02x}", static_cast<unsigned char>(byte)); }

/// How many bytes of a terminal sequence that this program may print stand at the start of `text`: ESC [ n m, or
/// CR ESC [ K. 0: none. Empty: the text ends inside of one.
std::optional<std::size_t> own_sequence(std::string_view text) {
  std::size_t i = 0;
  const bool rewrites = text[0] == '\r';
  if (rewrites) ++i;
  for (const char expected : {'\x1b', '['}) {
    if (i == text.size()) return std::nullopt;
    if (text[i++] != expected) return 0;
  }
  const std::size_t digits = i;
  while (!rewrites && i < text.size() && i < digits + 3 && text[i] >= '0' && text[i] <= '9') ++i;
  if (i == text.size()) return std::nullopt;
  return text[i] == (rewrites ? 'K' : 'm') ? i + 1 : 0;
}

}  // namespace

std::string TextFilter::add(std::string_view chunk) {
  const std::string text = std::move(pending_) + std::string(chunk);
  pending_.clear();
  return filter(text, false);
}

std::string TextFilter::finish() {
  const std::string text = std::move(pending_);
  pending_.clear();
  return filter(text, true);
}

std::string TextFilter::filter(std::string_view text, bool is_last) {
  std::string result;
  for (std::size_t i = 0; i < text.size();) {
    const char c = text[i];
    const std::string_view rest = text.substr(i);
    const auto hold = [&] { pending_ = rest; };
    const bool was_at_start = at_line_start_;
    at_line_start_ = (c == '\n' && allowed_.line_feeds) || (at_line_start_ && c == ' ');
    if (c == '\n' && allowed_.line_feeds) {
      result += c;
      ++i;
    } else if (c == '\r' && allowed_.line_feeds && rest.starts_with("\r\n")) {  // the end of a line of CSV
      result += c;
      ++i;
    } else if (c == '\r' && allowed_.line_feeds && !allowed_.colors && rest.size() == 1 && !is_last) {
      at_line_start_ = was_at_start;
      return hold(), result;
    } else if (allowed_.colors && (c == '\x1b' || c == '\r')) {
      at_line_start_ = was_at_start;
      const auto bytes = own_sequence(rest);
      if (!bytes && !is_last) return hold(), result;
      result += bytes && *bytes > 0 ? std::string(rest.substr(0, *bytes)) : escaped_byte(c);
      i += bytes && *bytes > 0 ? *bytes : 1;
    } else if ((c == ':' && was_at_start) || c == '#') {
      const std::string_view command = c == ':' ? "::" : "##[";
      if (!is_last && rest.size() < command.size() && command.starts_with(rest)) {
        at_line_start_ = was_at_start;
        return hold(), result;
      }
      result += rest.starts_with(command) ? escaped(static_cast<unsigned char>(c)) : std::string(1, c);
      ++i;
    } else if (c >= ' ' && c <= '~') {
      result += c;
      ++i;
    } else if (static_cast<unsigned char>(c) <= 0x7f) {
      result += c == '\x7f' ? escaped(0x7f) : escaped_byte(c);
      ++i;
    } else {
      const std::string_view character = rest.substr(0, character_bytes(c));
      if (!is_last && character.size() == rest.size() && !is_utf8(character) && character.size() < character_bytes(c)) {
        at_line_start_ = was_at_start;
        return hold(), result;
      }
      const bool valid = character.size() > 1 && is_utf8(character);
      if (!valid) {
        result += escaped_byte(c);
      } else {
        result += is_acted_on(code_point(character)) ? escaped(code_point(character)) : std::string(character);
      }
      i += valid ? character.size() : 1;
    }
  }
  return result;
}

std::string safe_line(std::string_view text) {
  TextFilter filter({.line_feeds = false, .colors = false});
  const std::string begin = filter.add(text);
  return begin + filter.finish();
}

std::string safe_text(std::string_view text) {
  TextFilter filter({.line_feeds = true, .colors = false});
  const std::string begin = filter.add(text);
  return begin + filter.finish();
}

}  // namespace kvq
