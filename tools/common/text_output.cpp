#include "common/text_output.h"

#include <kvq/container/atomic_file.h>

#include <fmt/format.h>

#include <span>

namespace kvq {

namespace {

constexpr const char* kStandardOutput = "-";

}  // namespace

std::optional<OutputClaim> claim_text_output(const std::string& path, const char* tool) {
  if (path.empty() || path == kStandardOutput) return std::nullopt;
  return OutputClaim::of_file(path, tool);
}

void write_text_output(const std::string& path, const std::string& text) {
  if (path == kStandardOutput) {
    fmt::print("{}", text);
    return;
  }
  AtomicFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

}  // namespace kvq
