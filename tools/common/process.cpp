#include "common/process.h"

#include "common/say.h"

#include <kvq/container/temporaries.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <string_view>
#include <system_error>
#include <thread>

// A signal handler must not remove files. The handler therefore writes to a pipe, and a cleaner thread reads the pipe,
// removes all temporaries and ends the process. Other threads run until then. If another thread fails because its file
// is gone, run_tool() waits for the end of the process, so the failure is never reported.

namespace kvq {

namespace {

constexpr int kInterrupted = 130;

int wake_end = -1;  ///< of the pipe: the handler writes here
std::atomic<const char*> interruption_advice = "";

extern "C" void wake_cleaner(int) {
  const int before = errno;
  [[maybe_unused]] const auto written = write(wake_end, "", 1);
  errno = before;
}

void clean_when_woken(const char* tool, int read_end) {
  char byte;
  while (read(read_end, &byte, 1) != 1)
    if (errno != EINTR) return;
  remove_temporaries();
  say(fmt::format("\n{}: interrupted{}\n", tool, interruption_advice.load()));
  _exit(kInterrupted);
}

void watch_interruptions(const char* tool) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return;  // without the pipe, signals end the process as by default
  wake_end = ends[1];
  try {
    std::thread(clean_when_woken, tool, ends[0]).detach();
  } catch (const std::system_error&) {
    return;  // nor without the thread
  }
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    const auto before = std::signal(number, wake_cleaner);
    if (before == SIG_IGN) std::signal(number, SIG_IGN);
  }
}

/// A descriptor that is open in the wrong direction fails as a closed one does, but keeps its number.
void open_closed_streams() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(descriptor, F_GETFD) != -1 || errno != EBADF) continue;
    [[maybe_unused]] const int opened = open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

/// OpenBLAS starts its threads before main(), so that only a new start of the program can do without them.
void start_without_blas_threads(char** argv) {
  constexpr const char* kThreads = "OPENBLAS_NUM_THREADS";
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  const char* set = std::getenv(kThreads);
  if (set != nullptr && std::string_view(set) == "1") return;
  setenv(kThreads, "1", 1);
  execv("/proc/self/exe", argv);  // if this fails, the tool goes on and may wait for ever
}

}  // namespace

void prepare_process(const char* tool, char** argv) {
  start_without_blas_threads(argv);
  open_closed_streams();
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  watch_interruptions(tool);
}

void set_interruption_advice(const char* advice) { interruption_advice = advice; }

}  // namespace kvq
