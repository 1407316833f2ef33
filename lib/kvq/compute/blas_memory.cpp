#include <kvq/compute/blas_memory.h>
#include <kvq/core/error.h>

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>
#include <mutex>
#include <vector>

namespace kvq::blas {

namespace {

/// Of OpenBLAS on x86-64; elsewhere its buffers are smaller.
constexpr std::size_t kBufferBytes = std::size_t{128} << 20;

/// Whether the system gives memory for `count` buffers. Memory that nothing is written to costs nothing.
bool has_room(int count) {
  std::vector<void*> blocks;
  for (int i = 0; i < count; ++i) {
    void* block = ::mmap(nullptr, kBufferBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) break;
    blocks.push_back(block);
  }
  for (void* block : blocks) ::munmap(block, kBufferBytes);
  return blocks.size() == static_cast<std::size_t>(count);
}

/// Address space that the process has, in MB; 0 if the system does not say.
std::size_t used_megabytes() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) >> 20;
}

/// OpenBLAS keeps the buffers that were in use together. Its two functions are found at run time, because other
/// implementations of BLAS do not have them.
void map_buffers(int count) {
  using Allocate = void* (*)(int);
  using Release = void (*)(void*);
  const auto allocate = reinterpret_cast<Allocate>(::dlsym(RTLD_DEFAULT, "blas_memory_alloc"));
  const auto release = reinterpret_cast<Release>(::dlsym(RTLD_DEFAULT, "blas_memory_free"));
  if (allocate == nullptr || release == nullptr) return;
  std::vector<void*> buffers;
  for (int i = 0; i < count; ++i) buffers.push_back(allocate(0));
  for (void* buffer : buffers) release(buffer);
}

}  // namespace

void reserve_buffers(int threads) {
  static std::mutex mutex;
  static int reserved = 0;  // OpenBLAS keeps buffers, so later calls need only the rest
  const std::lock_guard lock(mutex);
  if (threads <= reserved) return;
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  const int missing = threads - reserved;
  if (!has_room(missing))
    throw Error{ErrorKind::io,
                fmt::format("memory: {} threads need {} MB more for matrix products, but the process has {} of at most "
                            "{} MB (ulimit -v)",
                            threads, static_cast<std::size_t>(missing) * (kBufferBytes >> 20), used_megabytes(),
                            limit.rlim_cur >> 20),
                "run with fewer --threads, or with a higher ulimit -v"};
  map_buffers(threads);
  reserved = threads;
}

}  // namespace kvq::blas
