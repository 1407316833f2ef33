#include "common/side_format.h"

#include <kvq/core/error.h>
#include <kvq/plan/layer_pages.h>

#include <fmt/format.h>

#include <regex>

namespace kvq::bench {

SideFormat parse_side(const std::string& text, int head_dim, const char* flag) {
  if (text == "bf16") return {{head_dim, 16, head_dim, 0}, false};
  std::smatch part;
  if (std::regex_match(text, part, std::regex("w([1-9][0-9]{0,2})n([1-8])([bf]?)(t[34]|c)?"))) {
    TileSide side{
        .head_dim = head_dim,
        .bits = 0,
        .group_size = head_dim,
        .numbers = std::stoi(part[2]),
        .number_size = part[3] == "f" ? 4 : 2,
        .row_words = std::stoi(part[1]),
    };
    side.segments = part[4] == "c";
    if (part[4].matched && !side.segments) side.table_bits = part[4].str()[1] - '0';
    if (side.table_bits > 0 && 32 * side.row_words != head_dim * side.table_bits)
      throw Error{ErrorKind::usage,
                  fmt::format("{}: codebook codes of {} bits and head_dim {} are rows of {} words; found \"{}\"", flag,
                              side.table_bits, head_dim, head_dim * side.table_bits / 32, text)};
    return {side, part[3] == "b"};
  }
  if (!std::regex_match(text, part, std::regex("([us])([234])g([0-9]{1,4})(z?)([bf]?)(i[12])?")) ||
      (part[1] == "s" && part[4].length() > 0))
    throw Error{
        ErrorKind::usage,
        fmt::format("{}: expected bf16; or u or s, 2 to 4 bits, a group size and perhaps z (zero points, of u), b or "
                    "f, i1, i2: u2g128, u4g128i1; or bit tiles: w8n1, w12n1t3, w12n3c; found \"{}\"",
                    flag, text)};
  const TileSide side{
      .head_dim = head_dim,
      .bits = std::stoi(part[2]),
      .group_size = std::stoi(part[3]),
      .numbers = part[1] == "u" ? 2 : 1,
      .number_size = part[5] == "f" ? 4 : 2,
      .integer_zero = part[4].length() > 0,
      .index_bytes = part[6].matched ? part.str(6)[1] - '0' : 0,
  };
  return {side, part[5] == "b"};
}

std::string cache_name(const TileSide& k, bool k_bfloat, const TileSide& v, bool v_bfloat) {
  const std::string key = side_name(k, k_bfloat), value = side_name(v, v_bfloat);
  return key == value ? key : key + "/" + value;
}

}  // namespace kvq::bench
