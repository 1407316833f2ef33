#include "common/safe_output.h"

#include <kvq/core/text.h>

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string>

namespace kvq {

namespace {

/// What is behind a filtered stream.
struct Target {
  int descriptor;
  bool drops_errors;
  TextFilter filter;
};

/// Null before make_output_safe(). Never destroyed, because the streams are flushed at exit.
Target* output = nullptr;
Target* errors = nullptr;

bool write_all(int descriptor, const std::string& text) {
  for (std::size_t done = 0; done < text.size();) {
    const auto count = ::write(descriptor, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    done += static_cast<std::size_t>(count);
  }
  return true;
}

ssize_t write_filtered(void* cookie, const char* data, std::size_t size) {
  Target& target = *static_cast<Target*>(cookie);
  const bool written = write_all(target.descriptor, target.filter.add({data, size}));
  return written || target.drops_errors ? static_cast<ssize_t>(size) : 0;  // 0 is an error, with errno as it is
}

bool is_terminal(int descriptor) { return isatty(descriptor) == 1; }

Target* new_target(int descriptor, bool drops_errors) {
  return new Target{descriptor, drops_errors, TextFilter({.line_feeds = true, .colors = is_terminal(descriptor)})};
}

/// Replaces a stream, which glibc allows: `stdout` and `stderr` are variables there.
void replace(FILE*& stream, Target* target, int buffering) {
  FILE* filtered =
      ::fopencookie(target, "w", {.read = nullptr, .write = write_filtered, .seek = nullptr, .close = nullptr});
  if (filtered == nullptr) return;
  std::setvbuf(filtered, nullptr, buffering, BUFSIZ);
  stream = filtered;
}

}  // namespace

void make_output_safe() {
  if (output != nullptr) return;
  output = new_target(STDOUT_FILENO, false);
  errors = new_target(STDERR_FILENO, true);
  std::fflush(stdout);
  replace(stdout, output, is_terminal(STDOUT_FILENO) ? _IOLBF : _IOFBF);
  replace(stderr, errors, _IONBF);
}

void finish_output() {
  std::fflush(stdout);
  if (output == nullptr) return;
  write_all(output->descriptor, output->filter.finish());
  write_all(errors->descriptor, errors->filter.finish());
}

}  // namespace kvq
