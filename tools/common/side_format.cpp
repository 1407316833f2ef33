#include "common/side_format.h"

#include <kvq/core/error.h>
#include <kvq/plan/layer_pages.h>

#include <fmt/format.h>

#include <regex>

namespace kvq::bench {

SideFormat parse_side(const std::string& text, int head_dim, const char* flag) {
  if (text == "bf16") return {{head_dim, 16, head_dim, 0}, false};
  std::smatch part;
  if (!std::regex_match(text, part, std::regex("([us])([24])g([0-9]{1,4})(b?)")))
    throw Error{
        ErrorKind::usage,
        fmt::format("{}: expected bf16, or u or s, 2 or 4 bits, a group size and perhaps b, such as u2g128; found "
                    "\"{}\"",
                    flag, text)};
  return {{head_dim, std::stoi(part[2]), std::stoi(part[3]), part[1] == "u" ? 2 : 1}, part[4].length() > 0};
}

std::string cache_name(const TileSide& k, bool k_bfloat, const TileSide& v, bool v_bfloat) {
  const std::string key = side_name(k, k_bfloat), value = side_name(v, v_bfloat);
  return key == value ? key : key + "/" + value;
}

}  // namespace kvq::bench
