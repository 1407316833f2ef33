#include <emulator/machine.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

// A block of the emulated device: shared memory, barriers, copies and collectives of its threads.

namespace kvq::emulator {

namespace {

// ---- Barriers in shared memory -----------------------------------------------------------------------------------

struct Barrier {
  std::int32_t bytes;            ///< expected bytes minus arrived bytes
  std::uint16_t count, pending;  ///< number of arrivals; the top bit of `pending` is the barrier phase
};
static_assert(sizeof(Barrier) == 8);
constexpr unsigned kParity = 0x8000;

Barrier& barrier_at(Block& block, std::uint32_t address) {
  if (address % 8 || address >= kSharedBytes) fail("mbarrier: address %u", address);
  return *reinterpret_cast<Barrier*>(block.shared + address);
}
void complete(Barrier& barrier) {
  if (barrier.bytes != 0 || (barrier.pending & ~kParity) != 0) return;
  barrier.pending = static_cast<std::uint16_t>(((barrier.pending & kParity) ^ kParity) | barrier.count);
  ++progress;
}
void arrive(Block& block, std::uint32_t address, std::uint32_t bytes) {
  Barrier& barrier = barrier_at(block, address);
  if (barrier.count == 0 || barrier.count > 1024) fail("mbarrier: one that no thread has initialized, at %u", address);
  if ((barrier.pending & ~kParity) == 0)
    fail("mbarrier: more arrivals than its count, %u, at %u", barrier.count, address);
  barrier.bytes += static_cast<std::int32_t>(bytes);
  --barrier.pending;
  complete(barrier);
}

// ---- Copies ------------------------------------------------------------------------------------------------------

void carry_out(Block& block, const Copy& copy) {
  std::memcpy(block.shared + copy.to, copy.from, copy.bytes);
  ++progress;
}
void spoil(std::uint32_t to, std::uint32_t bytes) { std::memset(running->block->shared + to, 0xFF, bytes); }
void check_copy(std::uint32_t to, const void* from, std::uint32_t bytes) {
  if (to % 16 || bytes % 16 || reinterpret_cast<std::uintptr_t>(from) % 16)
    fail("copy: %u bytes from %p to %u: no multiples of 16", bytes, from, to);
  if (to + bytes > kSharedBytes) fail("copy: %u bytes to %u: not in shared memory", bytes, to);
}

/// Carries out the thread's oldest copy or arrival.
void advance(Thread& thread) {
  const Copy copy = thread.copies.front();
  thread.copies.erase(thread.copies.begin());
  if (copy.bytes)
    carry_out(*thread.block, copy);
  else
    arrive(*thread.block, copy.to, 0);
}

}  // namespace

bool ready(const Thread& thread) {
  switch (thread.state) {
    case Thread::State::runs: return true;
    case Thread::State::meets: return false;
    case Thread::State::at_block_barrier: return *thread.generation != thread.seen_generation;
    case Thread::State::at_mbarrier: {
      const Barrier& barrier = barrier_at(*thread.block, thread.address);
      return (barrier.pending & kParity ? 1u : 0u) != thread.parity;
    }
    case Thread::State::waits_for_kernels: return !thread.block->grid->before || thread.block->grid->before->ended;
    case Thread::State::ended: return false;
  }
  return false;
}

// ---- Collectives -------------------------------------------------------------------------------------------------

std::byte* shared_window() { return running->block->shared; }
int lane() { return static_cast<int>(running->place.thread.x) % kWarpThreads; }

namespace {

template <int kLanes>
void meet(Meetings<kLanes>& meetings, int first, int lane, const char* what, const std::bitset<kLanes>& mask,
          void* mine, void (*finish)(void* const (&)[kLanes])) {
  const auto at = static_cast<std::size_t>(lane);
  if (!mask[at]) fail("%s: a lane that its mask leaves out", what);
  std::size_t i = 0;
  while (i < meetings.size() && meetings[i].mask != mask) ++i;
  if (i == meetings.size()) meetings.push_back({what, mask, {}, {}});
  Meeting<kLanes>& meeting = meetings[i];
  if (meeting.what != what && std::strcmp(meeting.what, what) != 0)
    fail("lanes of a warp meet at %s and at %s", meeting.what, what);
  meeting.came[at] = true, meeting.lanes[at] = mine;
  if (meeting.came != mask) {
    running->state = Thread::State::meets;
    yield();
    return;
  }
  finish(meeting.lanes);
  ++progress;
  for (std::size_t other = 0; other < kLanes; ++other)
    if (mask[other]) running->block->threads[static_cast<std::size_t>(first) + other].state = Thread::State::runs;
  meetings.erase(meetings.begin() + static_cast<std::ptrdiff_t>(i));
}

}  // namespace

void meet_warp(const char* what, unsigned mask, void* mine, void (*finish)(void* const (&)[kWarpThreads])) {
  const int thread = static_cast<int>(running->place.thread.x), warp = thread / kWarpThreads;
  meet<kWarpThreads>(running->block->meetings[static_cast<std::size_t>(warp)], warp * kWarpThreads,
                     thread % kWarpThreads, what, mask, mine, finish);
}
void meet_warpgroup(const char* what, void* mine, void (*finish)(void* const (&)[4 * kWarpThreads])) {
  constexpr int kThreads = 4 * kWarpThreads;
  const int thread = static_cast<int>(running->place.thread.x), group = thread / kThreads;
  meet<kThreads>(running->block->group_meetings[static_cast<std::size_t>(group)], group * kThreads, thread % kThreads,
                 what, ~std::bitset<kThreads>(), mine, finish);
}

bool block_barrier(int name, int threads, bool waits, bool vote) {
  Block& block = *running->block;
  NamedBarrier& barrier = block.barriers[name];
  const int count = threads ? threads : static_cast<int>(block.threads.size());
  if (barrier.arrived == 0) barrier.count = count;
  if (barrier.count != count) fail("barrier %d: of %d threads, and of %d", name, barrier.count, count);
  barrier.vote = barrier.vote || vote;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    barrier.last_vote = barrier.vote, barrier.vote = false;
    ++barrier.generation;
    ++progress;
    return barrier.last_vote;
  }
  if (!waits) return false;
  running->generation = &barrier.generation, running->seen_generation = barrier.generation;
  running->state = Thread::State::at_block_barrier;
  yield();
  return barrier.last_vote;
}

void mbarrier_init(std::uint32_t address, std::uint32_t count) {
  if (count == 0 || count > 1024) fail("mbarrier: a count of %u", count);
  barrier_at(*running->block, address) = {0, static_cast<std::uint16_t>(count), static_cast<std::uint16_t>(count)};
}
void mbarrier_arrive(std::uint32_t address, std::uint32_t expected_bytes) {
  arrive(*running->block, address, expected_bytes);
}
void mbarrier_wait(std::uint32_t address, std::uint32_t parity) {
  running->address = address, running->parity = parity;
  running->state = Thread::State::at_mbarrier;
  if (ready(*running) && random_below(4)) {
    running->state = Thread::State::runs;
    return;
  }
  yield();
}

void bulk_copy(std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t barrier) {
  check_copy(to, from, bytes);
  if (bytes == 0) fail("bulk copy: no bytes");
  spoil(to, bytes);
  running->block->copies.push_back({to, from, bytes, barrier, random_below(4) == 0});
}
void thread_copy(std::uint32_t to, const void* from, std::uint32_t bytes) {
  check_copy(to, from, bytes);
  spoil(to, bytes);
  running->copies.push_back({to, from, bytes, running->group});
}
void thread_copy_commit() { ++running->group; }
void thread_copy_wait(int pending_groups) {
  // A wait for all copies includes copies that are not committed to a group yet.
  while (!running->copies.empty() &&
         (pending_groups == 0 || running->copies.front().group < running->group - pending_groups))
    advance(*running);
}
void thread_copy_arrive(std::uint32_t barrier) { running->copies.push_back({barrier, nullptr, 0, running->group}); }

void launch_dependents() { running->block->launched_dependents = true; }
void wait_for_kernels_before() {
  running->state = Thread::State::waits_for_kernels;
  if (ready(*running)) {
    running->state = Thread::State::runs;
    return;
  }
  yield();
}

// ---- Blocks ------------------------------------------------------------------------------------------------------

namespace {

auto& free_windows = *new std::vector<std::byte*>;

}  // namespace

Block::Block(Grid& of, uint3 index, int on) : grid(&of), multiprocessor(on) {
  const dim3 size = of.launch.block;
  const std::size_t count = std::size_t{size.x} * size.y * size.z, warps = (count + kWarpThreads - 1) / kWarpThreads;
  if (size.y != 1 || size.z != 1 || count == 0 || count > 1024)
    fail("a block of %u x %u x %u threads", size.x, size.y, size.z);
  if (free_windows.empty())
    shared = static_cast<std::byte*>(std::aligned_alloc(kSharedBytes, kSharedBytes));
  else
    shared = free_windows.back(), free_windows.pop_back();
  // Dynamic shared memory, static variables, and a guard behind each.
  static_begin = static_end = (of.launch.shared_bytes + kGuardBytes + 1023) / 1024 * 1024;
  std::memset(shared, 0xFF, std::min(static_begin + kStaticBytes, kSharedBytes));
  threads.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    threads[i].block = this;
    threads[i].place = {{static_cast<unsigned>(i), 0, 0}, index, size, of.launch.grid};
  }
  alive = static_cast<int>(count);
  meetings.resize(warps);
  group_meetings.resize((warps + 3) / 4);
}

Block::~Block() { free_windows.push_back(shared); }

void Block::end() {
  if (!copies.empty()) fail("a block ended while %zu of its bulk copies were on their way", copies.size());
  for (std::size_t i = 0; i < kGuardBytes; ++i)
    if (shared[grid->launch.shared_bytes + i] != std::byte{0xFF})
      fail("a block wrote behind the %zu bytes of shared memory that it had asked for", grid->launch.shared_bytes);
}

namespace {

/// One turn of a warp: its lanes in a random order, each at most once.
struct Turn {
  Turn(Block& of, int warp) : block(&of), first(warp * kWarpThreads) {
    count = std::min(kWarpThreads, static_cast<int>(of.threads.size()) - first);
    from = static_cast<int>(random_below(static_cast<std::size_t>(count)));
    backwards = random_below(2);
  }

  Block* block;
  int first, count, from, taken = 0;
  bool backwards, ran = false;  ///< ran: a lane did more than poll
};
Turn* turn = nullptr;  ///< the turn that runs

/// Lets a warp's lanes run until each waits, at most for `turns` turns.
/// @return false if lanes did nothing but poll
bool run_warp(Block& block, int warp, int turns) {
  bool any = false;
  for (; turns > 0; --turns) {
    Turn now(block, warp);
    turn = &now;
    run_threads();
    turn = nullptr;
    if (!now.ran) break;
    any = true;
  }
  return any;
}

}  // namespace

Thread* next_thread() {
  if (running) {
    if (running->state == Thread::State::ended) --turn->block->alive;
    turn->ran = turn->ran || !running->polls;
  }
  while (turn->taken < turn->count) {
    const int i = turn->taken++;
    const int at = (turn->from + (turn->backwards ? turn->count - i : i)) % turn->count;
    Thread& thread = turn->block->threads[static_cast<std::size_t>(turn->first + at)];
    if (!ready(thread)) continue;
    if (!thread.polls) ++progress;
    thread.polls = false;
    thread.state = Thread::State::runs;
    return &thread;
  }
  return nullptr;
}

bool Block::run() {
  const int warps = static_cast<int>(meetings.size());
  const int first = static_cast<int>(random_below(static_cast<std::size_t>(warps)));
  bool any = false;
  for (int i = 0; i < warps && alive > 0; ++i)
    any = run_warp(*this, (first + i) % warps, 1 + static_cast<int>(random_below(64))) || any;
  return any;
}

bool Block::land_a_copy(bool late_ones) {
  const std::size_t any = copies.empty() ? 0 : random_below(copies.size());
  if (!copies.empty() && (late_ones || !copies[any].late)) {
    const BulkCopy copy = copies[any];
    copies[any] = copies.back(), copies.pop_back();
    std::memcpy(shared + copy.to, copy.from, copy.bytes);
    Barrier& barrier = barrier_at(*this, copy.barrier);
    barrier.bytes -= static_cast<std::int32_t>(copy.bytes);
    complete(barrier);
    ++progress;
    return true;
  }
  const std::size_t first = random_below(threads.size());
  for (std::size_t i = 0; i < threads.size(); ++i) {
    Thread& thread = threads[(first + i) % threads.size()];
    if (thread.copies.empty()) continue;
    advance(thread);
    return true;
  }
  return false;
}

void* static_shared(const void* variable, std::size_t bytes, std::size_t alignment) {
  Block& block = *running->block;
  for (const auto& [known, address] : block.statics)
    if (known == variable) return block.shared + address;
  const std::size_t at = (block.static_end + alignment - 1) / alignment * alignment;
  if (at + bytes > std::min(block.static_begin + kStaticBytes, kSharedBytes))
    fail("static variables take more shared memory than is emulated");
  block.static_end = at + bytes;
  block.statics.emplace_back(variable, at);
  return block.shared + at;
}

}  // namespace kvq::emulator
