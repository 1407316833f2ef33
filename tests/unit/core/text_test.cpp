#include <kvq/core/text.h>

#include <catch2/catch.hpp>

#include <string>

using namespace kvq;

namespace {

/// A code point in UTF-8 with `length` bytes, even if UTF-8 forbids that length.
std::string encoded(std::uint32_t point, int length) {
  if (length == 1) return {static_cast<char>(point)};
  std::string text;
  for (int i = 0; i < length - 1; ++i) {
    text.insert(text.begin(), static_cast<char>(0x80u | (point & 0x3fu)));
    point >>= 6;
  }
  const std::uint32_t lead[] = {0, 0, 0xc0u, 0xe0u, 0xf0u, 0xf8u};
  text.insert(text.begin(), static_cast<char>(lead[length] | point));
  return text;
}

int shortest(std::uint32_t point) { return point < 0x80 ? 1 : point < 0x800 ? 2 : point < 0x10000 ? 3 : 4; }

}  // namespace

TEST_CASE("UTF-8 is every code point in its shortest form, and nothing else", "[core]") {
  for (std::uint32_t point = 0; point < 0x120000; point += point < 0x20000 ? 1 : 61) {
    const bool surrogate = point >= 0xd800 && point <= 0xdfff;
    const bool allowed = !surrogate && point <= 0x10ffff;
    const int bytes = shortest(point);
    if (is_utf8("a" + encoded(point, bytes) + "z") != allowed) FAIL("code point " << std::hex << point);
    for (int length = bytes + 1; length <= 4; ++length)
      if (is_utf8(encoded(point, length))) FAIL("overlong code point " << std::hex << point);
  }
  CHECK(is_utf8(""));
}

TEST_CASE("Cut, lone and impossible UTF-8 bytes are refused", "[core]") {
  for (const char* text : {"\x80", "a\xbf", "\xc3", "\xe2\x82", "\xe2\x82z", "\xf0\x9f\x98", "\xf0\x9f\x98z",
                           "\xf8\x88\x80\x80\x80", "\xfe", "\xff", "\xc3\xc3"})
    CHECK_FALSE(is_utf8(text));
}

TEST_CASE("Text of unknown origin is one line of printable ASCII in a message", "[core]") {
  CHECK(printable("plain ~") == "plain ~");
  CHECK(printable("a\nb\x1b[31m\x7f\xff") == "a\\x0ab\\x1b[31m\\x7f\\xff");
  CHECK(printable(std::string("\0", 1)) == "\\x00");
  CHECK(printable("12345", 5) == "12345");
  CHECK(printable("123456", 5) == "12345...");
}

TEST_CASE("Bytes that are no UTF-8 become U+FFFD, each of them", "[core]") {
  const std::string bad = "\xef\xbf\xbd";
  CHECK(utf8_text("plain \xc3\xbc\xe2\x82\xac\xf0\x9f\x98\x80\n") == "plain \xc3\xbc\xe2\x82\xac\xf0\x9f\x98\x80\n");
  CHECK(utf8_text("") == "");
  CHECK(utf8_text("\xff") == bad);
  CHECK(utf8_text("a\xe2\x82") == "a" + bad + bad);
  CHECK(utf8_text("\xe2\x82z\xc3\xbc") == bad + bad + "z\xc3\xbc");
  CHECK(utf8_text("\xed\xa0\x80") == bad + bad + bad);  // a surrogate
  for (int first = 0; first < 256; ++first)
    for (int second = 0; second < 256; ++second)
      if (!is_utf8(utf8_text(std::string{static_cast<char>(first), static_cast<char>(second), 'z'})))
        FAIL(first << " " << second);
}

TEST_CASE("What a terminal or a CI runner acts on is escaped, and other text is not", "[core]") {
  const auto both = [](std::string_view text, std::string_view shown) {
    CHECK(safe_line(text) == shown);
    CHECK(safe_text(text) == shown);
  };
  both("plain ~ \xc3\xbc\xe2\x82\xac\xf0\x9f\x98\x80", "plain ~ \xc3\xbc\xe2\x82\xac\xf0\x9f\x98\x80");
  both("a\x1b[31mb\r\t", "a\\x1b[31mb\\x0d\\x09");
  both(std::string_view("\0", 1), "\\x00");
  both("\x7f\xc2\x80\xc2\x9b\xc2\x9f\xc2\xa0", "\\u007f\\u0080\\u009b\\u009f\xc2\xa0");
  both("\xe2\x80\xaa\xe2\x80\xae\xe2\x81\xa6\xe2\x81\xa9", "\\u202a\\u202e\\u2066\\u2069");
  both("\xe2\x80\x8e\xe2\x80\x8f\xd8\x9c\xe2\x80\xa8\xe2\x80\xa9\xef\xbb\xbf",
       "\\u200e\\u200f\\u061c\\u2028\\u2029\\ufeff");
  both("\xff\xe2\x82", "\\xff\\xe2\\x82");
  both("::error::no", "\\u003a:error::no");
  both("  ::error::no", "  \\u003a:error::no");
  both("a ::b :c: #d##", "a ::b :c: #d##");
  both("x##[error]###[", "x\\u0023#[error]#\\u0023#[");
  CHECK(safe_text("a\n::b\n") == "a\n\\u003a:b\n");
  CHECK(safe_line("a\n::b") == "a\\x0a::b");
}

TEST_CASE("Text is filtered alike in chunks of any size", "[core]") {
  const std::string text =
      "::a\n  ::b\x1b[1mc\x1b[0m \x1b[2J\r\x1b[K50%\r\x1b]x ##[d \xe2\x80\xae \xf0\x9f\x98\x80 \xf0\x9f#";
  for (const bool colors : {false, true}) {
    TextFilter whole({.line_feeds = true, .colors = colors});
    const std::string begin = whole.add(text);
    const std::string expected = begin + whole.finish();
    for (std::size_t size = 1; size < text.size(); ++size) {
      TextFilter filter({.line_feeds = true, .colors = colors});
      std::string shown;
      for (std::size_t i = 0; i < text.size(); i += size) shown += filter.add(std::string_view(text).substr(i, size));
      shown += filter.finish();
      INFO("chunks of " << size);
      CHECK(shown == expected);
    }
    CHECK(expected == (colors ? "\\u003a:a\n  \\u003a:b\x1b[1mc\x1b[0m \\x1b[2J\r\x1b[K50%\\x0d\\x1b]x \\u0023#[d "
                                "\\u202e \xf0\x9f\x98\x80 \\xf0\\x9f#"
                              : "\\u003a:a\n  \\u003a:b\\x1b[1mc\\x1b[0m \\x1b[2J\\x0d\\x1b[K50%\\x0d\\x1b]x "
                                "\\u0023#[d \\u202e \xf0\x9f\x98\x80 \\xf0\\x9f#"));
  }
}
