#include "cli.h"

#include <kvq/core/error.h>

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <new>

namespace kvq {

namespace {

int fail(const char* tool, const std::string& message, const std::string& hint, int code) {
  fmt::print(stderr, "{}: error: {}\n", tool, message);
  if (!hint.empty()) fmt::print(stderr, "hint: {}\n", hint);
  return code;
}

}  // namespace

int run_tool(const char* tool, CLI::App& app, int argc, char** argv, const std::function<int()>& body) {
  try {
    app.parse(argc, argv);
    const int code = body();
    // Results may be piped: a full disk or a closed pipe must not look like success.
    if (std::fflush(stdout) != 0) return fail(tool, "cannot write to standard output", "", 3);
    return code;
  } catch (const CLI::Success& success) {  // --help, --version
    return app.exit(success) == 0 ? 0 : 1;
  } catch (const CLI::ParseError& error) {
    return fail(tool, error.what(), fmt::format("see {} --help", tool), 2);
  } catch (const Error& error) {
    return fail(tool, error.what(), error.hint(), exit_code(error.kind()));
  } catch (const std::bad_alloc&) {
    return fail(tool, "out of memory", "run with --dry-run to see how much is needed, or with fewer --threads", 3);
  } catch (const std::exception& error) {
    return fail(tool, fmt::format("unexpected: {}", error.what()), "this is a bug in kvq", 1);
  }
}

std::vector<int> parse_int_list(const std::string& text, const char* flag) {
  const auto bad = [&] {
    return Error{ErrorKind::usage, fmt::format("{}: expected a list such as 0-3,7, found \"{}\"", flag, text)};
  };
  std::vector<int> values;
  const char* at = text.data();
  const char* end = at + text.size();
  while (true) {
    int first = 0;
    auto parsed = std::from_chars(at, end, first);
    if (parsed.ec != std::errc{} || first < 0) throw bad();
    int last = first;
    if (parsed.ptr != end && *parsed.ptr == '-') parsed = std::from_chars(parsed.ptr + 1, end, last);
    if (parsed.ec != std::errc{} || last < first || last > 4095) throw bad();
    for (int value = first; value <= last; ++value) values.push_back(value);
    if (parsed.ptr == end) break;
    if (*parsed.ptr != ',') throw bad();
    at = parsed.ptr + 1;
  }
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

bool wants_color(int stream_fd) { return isatty(stream_fd) == 1 && std::getenv("NO_COLOR") == nullptr; }

}  // namespace kvq
