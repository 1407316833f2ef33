#include <emulator/machine.h>

#include <cstddef>

// The `extern __shared__` arrays of kernels, one in each namespace that declares it. runtime_api.cpp recognizes them by
// their size, which no other variable has. Compiled with -femulated-tls, like the kernels.
namespace kvq {
namespace decode {
thread_local unsigned char memory[emulator::kSharedBytes];
}
namespace dequantize {
thread_local unsigned char memory[emulator::kSharedBytes];
}
namespace prefill {
thread_local unsigned char memory[emulator::kSharedBytes];
}
namespace write {
thread_local std::byte shared[emulator::kSharedBytes];
}
namespace generic {
thread_local std::byte shared[emulator::kSharedBytes], memory[emulator::kSharedBytes];
}
}  // namespace kvq
