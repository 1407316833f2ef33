#pragma once

#include <string>

namespace kvq {

/// The line of --version: "kvq-eval 0.2.0 (1a2b3c4d5)"; without the commit if the build did not know it.
std::string version_line(const std::string& tool);

}  // namespace kvq
