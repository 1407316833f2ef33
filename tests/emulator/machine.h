#pragma once

#include <emulator/device.h>

#include <bitset>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

/// The parts of an emulated device: runtime_api.cpp enqueues operations, device.cpp runs them.
namespace kvq::emulator {

// A small Hopper: a few multiprocessors, each as large as a real one.
constexpr int kDevices = 2, kMultiprocessors = 3;
constexpr std::size_t kSharedPerMultiprocessor = 228 * 1024, kSharedReserved = 1024, kSharedPerBlock = 227 * 1024;
constexpr int kThreadsPerMultiprocessor = 2048, kBlocksPerMultiprocessor = 32;
/// A block's window of shared memory: the dynamic part, a guard behind it, and static variables.
constexpr std::size_t kGuardBytes = 256, kStaticBytes = 48 * 1024;

struct Block;
struct Grid;

/// Built-in variables of a thread.
struct Place {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};

/// A copy by the thread itself (cp.async), or, without bytes, an arrival on the barrier at `to` behind earlier copies.
struct Copy {
  std::uint32_t to;
  const void* from;
  std::uint32_t bytes;
  int group;
};
struct BulkCopy {
  std::uint32_t to;
  const void* from;
  std::uint32_t bytes, barrier;
  bool late;  ///< completes only when the block's threads can do nothing else
};

struct Thread {
  enum class State { runs, meets, at_block_barrier, at_mbarrier, waits_for_kernels, ended };
  Block* block = nullptr;
  Place place = {};
  State state = State::runs;
  void* stack = nullptr;
  bool polls = false;
  // What the thread waits for.
  const long long* generation = nullptr;
  long long seen_generation = 0;
  std::uint32_t address = 0, parity = 0;
  std::vector<Copy> copies;
  int group = 0;
};

/// Lanes of a warp or a warpgroup that have arrived at a collective.
template <int kLanes>
struct Meeting {
  const char* what;
  std::bitset<kLanes> mask, came;
  void* lanes[kLanes];
};
template <int kLanes>
using Meetings = std::vector<Meeting<kLanes>>;

struct NamedBarrier {
  int arrived = 0, count = 0;
  bool vote = false, last_vote = false;
  long long generation = 0;
};

struct Block {
  Block(Grid& of, uint3 index, int on);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  /// Lets each warp run for a while. @return false if no warp made progress
  bool run();
  /// Carries out one of the pending copies, if any. @param late_ones  includes late copies
  bool land_a_copy(bool late_ones);
  void end();

  Grid* grid;
  int multiprocessor, alive = 0;
  std::byte* shared;
  std::vector<Thread> threads;
  std::vector<Meetings<kWarpThreads>> meetings;            ///< of each warp
  std::vector<Meetings<4 * kWarpThreads>> group_meetings;  ///< of each warpgroup
  NamedBarrier barriers[16];
  std::vector<BulkCopy> copies;
  bool launched_dependents = false;
  std::vector<std::pair<const void*, std::size_t>> statics;  ///< static variables and their offsets
  std::size_t static_begin, static_end;
};

struct Grid {
  std::uint64_t blocks() const { return std::uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z; }

  Launch launch;
  std::shared_ptr<Grid> before;  ///< the grid that wait_for_kernels_before() waits for, if this grid started early
  std::uint64_t placed = 0, retired = 0;
  bool ended = false;
};

/// An operation of a stream: a kernel, or host code that runs at once.
struct Operation {
  std::shared_ptr<Grid> grid;
  std::function<void()> on_host;
};
struct Stream {
  std::deque<Operation> queue;
};
struct Multiprocessor {
  std::size_t shared_bytes = 0;
  int threads = 0, blocks = 0;
};
struct Device {
  std::map<const void*, Stream> streams;
  std::vector<std::unique_ptr<Block>> blocks;
  Multiprocessor multiprocessors[kMultiprocessors];
};

extern Thread* running;
extern long long progress;  ///< counts events; if it stands still, there is a deadlock

/// Runs threads, one after the other, while next_thread() names one.
void run_threads();
/// The thread that runs when the running one yields or ends. @return nullptr if the turn of its warp is over
Thread* next_thread();
/// Lets the next thread run, or returns to the caller of run_threads().
void yield();
/// Whether the condition that a yielded thread waits for is true.
bool ready(const Thread& thread);
unsigned random_below(std::size_t count);

/// Runs until all streams are empty.
void finish_work(Device& device);

/// Address of a static variable in the running block's shared memory.
void* static_shared(const void* variable, std::size_t bytes, std::size_t alignment);

}  // namespace kvq::emulator
