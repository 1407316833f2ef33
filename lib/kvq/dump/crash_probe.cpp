// HDF5 1.10 believes much of what a file says: one wrong byte in a global heap, an object header or a B-tree can make
// it read beyond its buffers, free what it does not own, loop, or allocate for ever. Of small dumps with one to four
// random bytes changed, one in sixty crashed it. No check of ours can come first, since the library itself reads those
// structures. So all that HDF5 does with a file is done twice: by a child process, which may die of it, and then by us,
// in the same order. Contiguous data is read without HDF5 and only once.
//
// The child is made when a dump is opened, which is when a program starts: few threads, little memory, no GPU in use.

#include <kvq/dump/crash_probe.h>

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

namespace kvq {
namespace {

// Far more than it takes: structure costs milliseconds and a few MiB, data a second per GiB. A slow disk is no fault.
rlim_t cpu_seconds(std::uintmax_t input_bytes) { return 5 + (input_bytes >> 27); }
unsigned wall_seconds(std::uintmax_t input_bytes) { return 300 + static_cast<unsigned>(input_bytes >> 22); }
std::uintmax_t memory_bytes(std::uintmax_t input_bytes) { return (std::uintmax_t{512} << 20) + 2 * input_bytes; }

constexpr int kTooMuchMemory = 87;  // an exit status of the child that nothing else uses
std::uintmax_t max_resident_pages = 0;

/// Pages in memory: the second number of /proc/self/statm; 0 if there is no such file. Safe in a signal handler.
std::uintmax_t resident_pages() {
  const int file = ::open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  char text[128] = {};
  const auto count = ::read(file, text, sizeof text - 1);
  ::close(file);
  if (count <= 0) return 0;
  char* end = text;
  ::strtoull(text, &end, 10);
  return ::strtoull(end, nullptr, 10);
}

/// Called every few milliseconds of CPU time. A limit of the system would not do: it makes malloc fail, and HDF5 would
/// take another way than it will take in the parent.
void exit_if_bloated(int) {
  const int interrupted_errno = errno;
  if (resident_pages() > max_resident_pages) ::_exit(kTooMuchMemory);
  errno = interrupted_errno;
}

void watch_memory(std::uintmax_t input_bytes) {
  max_resident_pages =
      resident_pages() + memory_bytes(input_bytes) / static_cast<std::uintmax_t>(::sysconf(_SC_PAGESIZE));
  struct sigaction action{};
  action.sa_handler = exit_if_bloated;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGPROF, &action, nullptr);
  const itimerval often{{0, 20'000}, {0, 20'000}};
  ::setitimer(ITIMER_PROF, &often, nullptr);
}

/// Dying must be quiet and quick: no core, no handler of the program, no words of the allocator on stderr.
void prepare_to_die(std::uintmax_t input_bytes) {
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM, SIGXCPU}) ::signal(number, SIG_DFL);
  const rlimit no_core{0, 0}, cpu{cpu_seconds(input_bytes), cpu_seconds(input_bytes)};
  ::setrlimit(RLIMIT_CORE, &no_core);
  ::setrlimit(RLIMIT_CPU, &cpu);
  ::alarm(wall_seconds(input_bytes));
  watch_memory(input_bytes);
  if (const int null = ::open("/dev/null", O_WRONLY); null >= 0) ::dup2(null, STDERR_FILENO);
}

[[noreturn]] void run_as_child(const std::function<void()>& action, std::uintmax_t input_bytes) {
  prepare_to_die(input_bytes);
  try {
    action();
  } catch (...) {
    ::_exit(0);  // no crash: the parent will see the same and report it
  }
  ::_exit(0);  // no destructors and no exit handlers: they belong to the parent
}

std::optional<std::string> describe(int status) {
  if (WIFSIGNALED(status)) {
    const int number = WTERMSIG(status);
    if (number == SIGXCPU || number == SIGKILL || number == SIGALRM) return "endless loop";
    return ::strsignal(number);
  }
  if (WEXITSTATUS(status) == 0) return std::nullopt;
  return WEXITSTATUS(status) == kTooMuchMemory ? "too much memory" : "failure";  // the latter is a sanitizer's exit
}

}  // namespace

std::optional<std::string> fate_in_child(const std::function<void()>& action, std::uintmax_t input_bytes) {
  const pid_t child = ::fork();
  if (child == 0) run_as_child(action, input_bytes);
  if (child < 0) return std::nullopt;
  int status = 0;
  pid_t ended;
  do ended = ::waitpid(child, &status, 0);
  while (ended < 0 && errno == EINTR);
  return ended == child ? describe(status) : std::nullopt;
}

}  // namespace kvq
