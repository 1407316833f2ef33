// libFuzzer: bytes of a dump file. Opening and loading every layer either works or ends in a clean Error.
// Seeds: make_dump_seeds. The reader opens each file in a child process first. If HDF5 loops forever, the child is
// stopped after 5 s of CPU time; if HDF5 allocates all memory, only the child fails. Use -timeout=60
// -malloc_limit_mb=1048576.

#include <kvq/core/error.h>
#include <kvq/dump/dump_file.h>

#include <pthread.h>
#include <sanitizer/common_interface_defs.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

/// LeakSanitizer calls this function. HDF5 leaks objects that it has read only in part from a damaged file.
extern "C" const char* __lsan_default_suppressions() { return "leak:libhdf5"; }

using namespace kvq;

namespace {

/// HDF5 needs a path, so the input is written to a file; TMPDIR=/dev/shm keeps it in memory.
std::filesystem::path write_input(const std::uint8_t* data, std::size_t size) {
  static const auto path = std::filesystem::temp_directory_path() / fmt::format("kvq-fuzz-{}.h5", ::getpid());
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  return path;
}

}  // namespace

/// A child that crashes in HDF5 (crash_probe.h) is expected and no finding, so it must not save its input.
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
