#pragma once

#include <string>
#include <string_view>

namespace kvq {

/// "xxh3-128:<32 hex digits>" of a text.
std::string content_hash_of(std::string_view text);

}  // namespace kvq
