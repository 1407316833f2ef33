#include "common/temporary_folder.h"

#include <kvq/core/error.h>

#include <fmt/format.h>

#include <unistd.h>

#include <cstdlib>
#include <system_error>

namespace kvq {

std::filesystem::path temporary_prefix(const char* name) {
  std::error_code failed;
  const std::filesystem::path place = std::filesystem::temp_directory_path(failed);
  const char* named = std::getenv("TMPDIR");
  if (failed || ::access(place.c_str(), W_OK | X_OK) != 0)
    throw Error{ErrorKind::io, fmt::format("{}: cannot create a temporary folder", named != nullptr ? named : "/tmp"),
                "TMPDIR names the folder for temporary files"};
  return place / fmt::format("{}-", name);
}

}  // namespace kvq
