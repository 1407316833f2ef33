#pragma once

#include <fmt/core.h>

#include <cstddef>
#include <string>
#include <string_view>

namespace kvq {

/// Makes text of unknown origin safe for a one-line message: bytes outside printable ASCII become \xNN, and "..."
/// replaces everything beyond `max_bytes` bytes.
inline std::string printable(std::string_view text, std::size_t max_bytes = 120) {
  std::string result;
  for (const char c : text.substr(0, max_bytes)) {
    if (c >= ' ' && c <= '~') {
      result += c;
    } else {
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    }
  }
  if (text.size() > max_bytes) result += "...";
  return result;
}

/// Whether `text` is well-formed UTF-8 (RFC 3629): no overlong forms, no surrogates, nothing above U+10FFFF.
inline bool is_utf8(std::string_view text) {
  std::size_t i = 0;
  const auto byte_at = [&](std::size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0u; };
  const auto continues = [&](std::size_t at) { return (byte_at(at) & 0xc0u) == 0x80u; };
  while (i < text.size()) {
    const unsigned lead = byte_at(i), second = byte_at(i + 1);
    if (lead < 0x80) {
      i += 1;
    } else if (lead >= 0xc2 && lead <= 0xdf && continues(i + 1)) {
      i += 2;
    } else if (lead >= 0xe0 && lead <= 0xef && continues(i + 1) && continues(i + 2)) {
      if ((lead == 0xe0 && second < 0xa0) || (lead == 0xed && second > 0x9f)) return false;
      i += 3;
    } else if (lead >= 0xf0 && lead <= 0xf4 && continues(i + 1) && continues(i + 2) && continues(i + 3)) {
      if ((lead == 0xf0 && second < 0x90) || (lead == 0xf4 && second > 0x8f)) return false;
      i += 4;
    } else {
      return false;
    }
  }
  return true;
}

/// Makes text of unknown origin well-formed UTF-8: U+FFFD replaces every byte that belongs to no valid character.
inline std::string utf8_text(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size();) {
    std::size_t length = 1;
    while (length <= 4 && !is_utf8(text.substr(i, length))) ++length;
    const bool found = length <= 4 && i + length <= text.size();
    result += found ? text.substr(i, length) : "\xef\xbf\xbd";
    i += found ? length : 1;
  }
  return result;
}

/// Makes text of unknown origin safe to show on a terminal, in a log and in the output of a CI job, chunk by chunk.
/// Well-formed UTF-8 stays as it is, except for what a terminal or a CI runner would act on: control characters (C0,
/// DEL, C1), line and paragraph separators, byte order marks and marks that change the direction of text become \xNN
/// (one byte) or \uNNNN; so do bytes that are not UTF-8. "::" at the start of a line and "##[" are commands to GitHub's
/// runner, so their first character becomes \uNNNN. In JSON, all of these escapes mean the same character.
class TextFilter {
 public:
  struct Allowed {
    bool line_feeds = true;  ///< LF, and CR LF
    bool colors = false;     ///< ESC [ n m, and CR ESC [ K, which rewrites a line of progress
  };
  explicit TextFilter(Allowed allowed) : allowed_(allowed) {}
  /// Holds back the end of the chunk if what it means depends on the next chunk.
  std::string add(std::string_view chunk);
  std::string finish();  ///< what add() held back

 private:
  std::string filter(std::string_view text, bool is_last);
  Allowed allowed_;
  std::string pending_;
  bool at_line_start_ = true;
};

/// One line: a file's name or a name inside a file, as a part of a message.
std::string safe_line(std::string_view text);
/// Several lines: line feeds stay.
std::string safe_text(std::string_view text);

}  // namespace kvq
