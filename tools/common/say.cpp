#include "common/say.h"

#include <cstdio>

namespace kvq {

void say(std::string_view text) noexcept { std::fwrite(text.data(), 1, text.size(), stderr); }

}  // namespace kvq
