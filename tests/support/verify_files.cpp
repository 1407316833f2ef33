// Verifies many artifacts in one process, for tests/cli/test_differential.py. Reads a path a line from standard input;
// prints for each path one line of JSON: the exit code that kvq-inspect --verify would give, and the failed checks or
// the error.

#include <kvq/artifact/verify.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <iostream>
#include <string>

using namespace kvq;

namespace {

Json verdict_of(const std::string& path) {
  try {
    Json failed = Json::array();
    for (const Check& check : verify_artifact(path))
      if (!check.passed) failed.push_back(check.name);
    return {{"code", failed.empty() ? 0 : exit_code(ErrorKind::check_failed)}, {"failed", std::move(failed)}};
  } catch (const Error& error) {
    return {{"code", exit_code(error.kind())}, {"error", error.what()}};
  }
}

}  // namespace

int main() {
  for (std::string path; std::getline(std::cin, path);)
    std::cout << verdict_of(path).dump(-1, ' ', true, Json::error_handler_t::replace) << std::endl;
}
