#include "common/cli.h"

#include "common/decimal.h"
#include "common/flag_error.h"
#include "common/safe_output.h"

#include <kvq/core/error.h>
#include <kvq/core/exit_code.h>
#include <kvq/core/text.h>

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <new>
#include <sstream>
#include <system_error>

namespace kvq {

namespace {

int fail(const char* tool, const std::string& message, const std::string& hint, int code) {
  // Each line of a message is one fault, so each line gets the prefix.
  std::istringstream lines(message);
  for (std::string line; std::getline(lines, line);) fmt::print(stderr, "{}: error: {}\n", tool, safe_line(line));
  if (!hint.empty()) fmt::print(stderr, "hint: {}\n", safe_line(hint));
  return code;
}

constexpr const char* kNoOutput = "cannot write to standard output";

/// Returns `code`, or an error code if standard output could not be written (full disk, closed pipe).
int flushed(const char* tool, int code) {
  std::cout.flush();
  finish_output();
  const bool written = std::cout.good() && std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  return written ? code : fail(tool, kNoOutput, "", 3);
}

}  // namespace

int run_tool(const char* tool, CLI::App& app, int argc, char** argv, const std::function<int()>& body) {
  make_output_safe();
  try {
    require_decimal_integers(app);
    app.parse(argc, argv);
    const int code = body();
    return flushed(tool, code);
  } catch (const CLI::Success& success) {  // --help, --version
    app.exit(success);
    return flushed(tool, 0);
  } catch (const CLI::ParseError& error) {
    const Error refused = flag_error(app, error);
    return fail(tool, refused.what(), refused.hint(), to_int(ExitCode::usage));
  } catch (const Error& error) {
    return fail(tool, error.what(), error.hint(), exit_code(error.kind()));
  } catch (const std::system_error&) {  // fmt::print throws it when a stream does not take its text
    return fail(tool, kNoOutput, "", 3);
  } catch (const std::bad_alloc&) {
    return fail(tool, "out of memory", "run with --dry-run to see how much is needed, or with fewer --threads", 3);
  } catch (const std::exception& error) {
    return fail(tool, fmt::format("unexpected: {}", error.what()), "this is a bug in kvq", 1);
  }
}

bool wants_color(int stream_fd) { return isatty(stream_fd) == 1 && std::getenv("NO_COLOR") == nullptr; }

}  // namespace kvq
