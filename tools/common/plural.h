#pragma once

#include <fmt/format.h>

#include <concepts>
#include <string>
#include <string_view>

namespace kvq {

/// "1 layer", "6 layers".
template <std::integral T>
std::string counted(T count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

}  // namespace kvq
