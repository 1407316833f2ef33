#include "common/cli.h"

#include "common/decimal.h"
#include "common/flag_error.h"
#include "common/process.h"
#include "common/safe_output.h"
#include "common/say.h"

#include <kvq/container/temporaries.h>
#include <kvq/core/error.h>
#include <kvq/core/exit_code.h>
#include <kvq/core/text.h>

#include <poll.h>
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
  for (std::string line; std::getline(lines, line);) say(fmt::format("{}: error: {}\n", tool, safe_line(line)));
  if (!hint.empty()) say(fmt::format("hint: {}\n", safe_line(hint)));
  return code;
}

/// A reader that wants no more, such as `head`, is no fault that somebody must read about.
bool reader_is_gone() {
  pollfd stream{.fd = STDOUT_FILENO, .events = POLLOUT, .revents = 0};
  return poll(&stream, 1, 0) == 1 && (stream.revents & POLLERR) != 0;
}

int fail_without_output(const char* tool) {
  const int refused = exit_code(ErrorKind::io);
  return reader_is_gone() ? refused : fail(tool, "cannot write to standard output", "", refused);
}

/// Returns `code`, or an error code if standard output could not be written (full disk, closed pipe).
int flushed(const char* tool, int code) {
  std::cout.flush();
  finish_output();
  const bool written = std::cout.good() && std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  return written ? code : fail_without_output(tool);
}

int run_guarded(const char* tool, CLI::App& app, int argc, char** argv, const std::function<int()>& body) {
  try {
    prepare_process(tool, argv);
    require_decimal_integers(app);
    app.parse(argc, argv);
    return flushed(tool, body());
  } catch (const CLI::Success& success) {  // --help, --version
    app.exit(success);
    return flushed(tool, 0);
  } catch (const CLI::ParseError& error) {
    const Error refused = flag_error(app, error);
    return fail(tool, refused.what(), refused.hint(), to_int(ExitCode::usage));
  } catch (const Error& error) {
    return fail(tool, error.what(), error.hint(), exit_code(error.kind()));
  } catch (const std::system_error& error) {
    // fmt::print throws it when standard output does not take its text; so do threads and files that the system refuses
    const bool is_output = std::ferror(stdout) != 0;
    return is_output ? fail_without_output(tool) : fail(tool, error.what(), "", exit_code(ErrorKind::io));
  } catch (const std::bad_alloc&) {
    return fail(tool, "out of memory", "run with --dry-run to see how much is needed, or with fewer --threads", 3);
  } catch (const std::exception& error) {
    return fail(tool, fmt::format("unexpected: {}", error.what()), "this is a bug in kvq", 1);
  }
}

}  // namespace

int run_tool(const char* tool, CLI::App& app, int argc, char** argv, const std::function<int()>& body) {
  make_output_safe();
  const int code = run_guarded(tool, app, argc, argv, body);
  wait_if_interrupted();
  return code;
}

bool wants_color(int stream_fd) { return isatty(stream_fd) == 1 && std::getenv("NO_COLOR") == nullptr; }

}  // namespace kvq
