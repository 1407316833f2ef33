#include "common/version.h"

#include <fmt/format.h>

namespace kvq {

std::string version_line(const std::string& tool) {
  const std::string commit = KVQ_COMMIT;
  return fmt::format("{} {}{}", tool, KVQ_VERSION, commit.empty() ? "" : fmt::format(" ({})", commit));
}

}  // namespace kvq
