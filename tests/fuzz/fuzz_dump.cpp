// libFuzzer: bytes of a dump file. Opening and loading every layer either works or ends in a clean Error.
// Seeds: make_dump_seeds. Where HDF5 loops for ever its child process is stopped after 5 s of CPU time, and where it
// asks for all memory that is the child's matter too: use -timeout=60 -malloc_limit_mb=1048576.

#include <kvq/core/error.h>
#include <kvq/dump/dump_file.h>

#include <pthread.h>
#include <sanitizer/common_interface_defs.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

/// LeakSanitizer asks for this. HDF5 leaks what it has half read of a damaged file.
extern "C" const char* __lsan_default_suppressions() { return "leak:libhdf5"; }

using namespace kvq;

namespace {

/// HDF5 wants a path, so the input goes to a file; TMPDIR=/dev/shm keeps it in memory.
std::filesystem::path write_input(const std::uint8_t* data, std::size_t size) {
  static const auto path = std::filesystem::temp_directory_path() / fmt::format("kvq-fuzz-{}.h5", ::getpid());
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  return path;
}

}  // namespace

/// A child that dies of HDF5 (crash_probe.h) is what we want, not a finding: it must not save its input as one.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  return ::pthread_atfork(nullptr, nullptr, [] { __sanitizer_set_death_callback(nullptr); });
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto path = write_input(data, size);
  try {
    const Dump dump = Dump::open({path});
    for (const LayerEntry& entry : dump.model().layers) {
      try {
        dump.load_layer(entry.layer);
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::internal) std::abort();
      }
    }
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::internal) std::abort();
  }
  std::filesystem::remove(path);
  return 0;
}
