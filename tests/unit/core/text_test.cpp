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
