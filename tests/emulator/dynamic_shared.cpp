#include <emulator/machine.h>

#include <cstddef>

// What kernels declare as `extern __shared__`, in the name of every namespace that does: of a size that no other
// variable has, by which runtime_api.cpp knows them. Compiled with -femulated-tls, like the kernels.
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
namespace plain {
thread_local std::byte shared[emulator::kSharedBytes], memory[emulator::kSharedBytes];
}
}  // namespace kvq
