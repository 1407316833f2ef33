#pragma once

#include <string>
#include <vector>

namespace kvq {

/// "0-3,7" as ascending numbers, each once. @throws Error{usage}
std::vector<int> parse_int_list(const std::string& text, const char* flag);

}  // namespace kvq
