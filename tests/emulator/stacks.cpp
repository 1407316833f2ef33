#include <emulator/machine.h>

#include <sys/mman.h>

#ifdef KVQ_EMULATOR_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

// Threads of the emulated device: each has a stack of its own, one of them runs at a time.

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// Switches from one stack to another: pushes the callee-saved registers, and pops those of the other stack.
// (swapcontext would do, but makes a system call each time, and a collective of a warp takes 32 switches.)
#ifndef __x86_64__
#error "the emulated device runs on x86-64: another architecture needs its own kvq_emulator_switch"
#endif
extern "C" void kvq_emulator_switch(void** left, void* to);
extern "C" void kvq_emulator_begin();
extern "C" void kvq_emulator_work(void* stack);
asm(R"(
.text
.globl kvq_emulator_switch
kvq_emulator_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.globl kvq_emulator_begin
kvq_emulator_begin:
  movq %rbx, %rdi
  call kvq_emulator_work
)");

namespace kvq::emulator {

Thread* running = nullptr;

namespace {

/// A stack for one thread at a time. Threads that end without waiting run on the same stack, one after the other.
struct Stack {
  static constexpr std::size_t kBytes = 128 * 1024;
  void* at = nullptr;  ///< stack pointer of a stack that was left
  Thread* thread = nullptr;
  void* bottom = nullptr;
  std::size_t bytes = kBytes;
  void* fake = nullptr;  ///< fake stack of AddressSanitizer
};
Stack scheduler;
// Never freed; still reachable, so leak detectors do not report them.
auto& idle_stacks = *new std::vector<Stack*>;

#ifdef KVQ_EMULATOR_ASAN
const Stack* left = nullptr;  ///< the stack that was left last

/// Tells AddressSanitizer that a switch is done, and learns the scheduler's stack, which differs between host threads.
void arrived(Stack& on) {
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(on.fake, &bottom, &bytes);
  if (left == &scheduler) scheduler.bottom = const_cast<void*>(bottom), scheduler.bytes = bytes;
}
void leave(Stack& from, Stack& to) {
  left = &from;
  __sanitizer_start_switch_fiber(&from.fake, to.bottom, to.bytes);
  kvq_emulator_switch(&from.at, to.at);
  arrived(from);
}
#else
void arrived(Stack&) {}
void leave(Stack& from, Stack& to) { kvq_emulator_switch(&from.at, to.at); }
#endif

Stack& new_stack();

/// The stack that runs next: of the next thread or, without one, the scheduler's.
Stack& next_stack() {
  Thread* next = next_thread();
  running = next;
  if (!next) return scheduler;
  threadIdx = next->place.thread, blockIdx = next->place.block;
  blockDim = next->place.block_dim, gridDim = next->place.grid_dim;
  if (!next->stack) {
    if (idle_stacks.empty()) idle_stacks.push_back(&new_stack());
    next->stack = idle_stacks.back(), idle_stacks.pop_back();
    static_cast<Stack*>(next->stack)->thread = next;
  }
  return *static_cast<Stack*>(next->stack);
}

void work(Stack& stack) {
  arrived(stack);
  for (;;) {
    Thread& thread = *stack.thread;
    thread.block->grid->launch.thread();
    thread.state = Thread::State::ended;
    thread.stack = nullptr;
    idle_stacks.push_back(&stack);
    if (Stack& next = next_stack(); &next != &stack) leave(stack, next);
  }
}

}  // namespace
}  // namespace kvq::emulator

extern "C" void kvq_emulator_work(void* stack) { kvq::emulator::work(*static_cast<kvq::emulator::Stack*>(stack)); }

namespace kvq::emulator {
namespace {

Stack& new_stack() {
  auto* stack = new Stack;
  void* memory =
      mmap(nullptr, Stack::kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, 4096, PROT_NONE) != 0) fail("no memory for another stack");
  // The same contents as a stack that was left: six registers, of which kvq_emulator_begin reads one, and the address
  // to continue at.
  auto* top = reinterpret_cast<void**>(static_cast<std::byte*>(memory) + Stack::kBytes) - 2;
  *top = nullptr;
  *--top = reinterpret_cast<void*>(kvq_emulator_begin);
  for (int i = 0; i < 6; ++i) *--top = stack;
  stack->at = top, stack->bottom = memory;
  return *stack;
}

}  // namespace

void run_threads() {
  if (Stack& next = next_stack(); &next != &scheduler) leave(scheduler, next);
}

void yield() {
  // The running thread itself is next only in a later turn, so it leaves its stack.
  Stack& stack = *static_cast<Stack*>(running->stack);
  leave(stack, next_stack());
}

void pause() {
  running->polls = true;
  yield();
}

}  // namespace kvq::emulator
