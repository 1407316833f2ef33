#pragma once

#include <string>

namespace kvq {

/// What --version prints: "kvq-eval 0.2.0 (1a2b3c4d5)"; without the commit where the build knew none.
std::string version_line(const std::string& tool);

}  // namespace kvq
