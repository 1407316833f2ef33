#include <emulator/machine.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

// An emulated device: blocks are placed on multiprocessors and run in turns.

namespace kvq::emulator {

long long progress = 0;

namespace {

std::uint64_t random_state = 1;

}  // namespace

unsigned random_below(std::size_t count) {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return static_cast<unsigned>((random_state >> 11) % count);
}
void set_seed(std::uint64_t seed) { random_state = (seed + 1) * 0x9E3779B97F4A7C15ull | 1; }

void fail(const char* format, ...) {
  std::fflush(stdout);
  std::fputs("emulated device: ", stderr);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  if (running) {
    const Place& place = running->place;
    std::fprintf(stderr, "; block %u,%u,%u thread %u", place.block.x, place.block.y, place.block.z, place.thread.x);
  }
  std::fputs("\n", stderr);
  std::abort();
}

namespace {

/// Places blocks of a grid on multiprocessors with free resources.
void place(Device& device, Grid& grid) {
  const dim3 size = grid.launch.grid;
  const std::size_t shared_bytes = grid.launch.shared_bytes + kSharedReserved;
  const int threads = static_cast<int>(grid.launch.block.x);
  while (grid.placed < grid.blocks()) {
    int best = -1;
    for (int i = 0; i < kMultiprocessors; ++i) {
      const Multiprocessor& m = device.multiprocessors[i];
      if (m.shared_bytes + shared_bytes > kSharedPerMultiprocessor || m.threads + threads > kThreadsPerMultiprocessor ||
          m.blocks >= kBlocksPerMultiprocessor)
        continue;
      if (best < 0 || m.blocks < device.multiprocessors[best].blocks) best = i;
    }
    if (best < 0) break;
    Multiprocessor& m = device.multiprocessors[best];
    m.shared_bytes += shared_bytes, m.threads += threads, ++m.blocks;
    const std::uint64_t i = grid.placed++;
    const uint3 index = {static_cast<unsigned>(i % size.x), static_cast<unsigned>(i / size.x % size.y),
                         static_cast<unsigned>(i / size.x / size.y)};
    device.blocks.push_back(std::make_unique<Block>(grid, index, best));
    ++progress;
  }
}

/// May the next kernel of the stream start, if it was launched with overlap?
bool lets_next_start(const Device& device, const Grid& grid) {
  if (grid.placed < grid.blocks()) return false;
  for (const auto& block : device.blocks)
    if (block->grid == &grid && !block->launched_dependents) return false;
  return true;
}

/// Starts all operations that may start. @return whether there is anything to do
bool start(Device& device) {
  bool any = !device.blocks.empty();
  for (auto& [id, stream] : device.streams) {
    for (std::size_t i = 0; i < stream.queue.size(); ++i) {
      Operation& operation = stream.queue[i];
      any = true;
      if (operation.on_host) {
        if (i > 0) break;
        operation.on_host();
        ++progress;
        stream.queue.pop_front(), --i;
        continue;
      }
      if (i > 0) {
        const Operation& before = stream.queue[i - 1];
        if (!operation.grid->launch.overlaps || !before.grid || !lets_next_start(device, *before.grid)) break;
      }
      if (!operation.grid->before && i > 0) operation.grid->before = stream.queue[i - 1].grid;
      place(device, *operation.grid);
    }
  }
  return any;
}

void retire(Device& device, std::size_t at) {
  Block& block = *device.blocks[at];
  Grid& grid = *block.grid;
  block.end();
  Multiprocessor& m = device.multiprocessors[block.multiprocessor];
  m.shared_bytes -= grid.launch.shared_bytes + kSharedReserved;
  m.threads -= static_cast<int>(grid.launch.block.x), --m.blocks;
  ++grid.retired, ++progress;
  device.blocks[at] = std::move(device.blocks.back()), device.blocks.pop_back();
  if (grid.retired < grid.blocks()) return;
  grid.ended = true;
  for (auto& [id, stream] : device.streams)
    while (!stream.queue.empty() && stream.queue.front().grid && stream.queue.front().grid->ended)
      stream.queue.pop_front();
}

const char* description(const Thread& thread) {
  static char text[200];
  switch (thread.state) {
    case Thread::State::runs: return "polls";
    case Thread::State::meets: return "waits for the others of a collective";
    case Thread::State::at_block_barrier: return "waits at a barrier of the block";
    case Thread::State::at_mbarrier:
      std::snprintf(text, sizeof text, "waits for the phase of parity %u of the mbarrier at %u", thread.parity,
                    thread.address);
      return text;
    case Thread::State::waits_for_kernels: return "waits for the kernel before";
    case Thread::State::ended: return "has ended";
  }
  return "";
}

[[noreturn]] void report_deadlock(const Device& device) {
  std::fprintf(stderr, "emulated device: nothing goes on any more\n");
  int lines = 0;
  for (const auto& block : device.blocks)
    for (const Thread& thread : block->threads) {
      if (thread.state == Thread::State::ended || (thread.place.thread.x % 32 && thread.state != Thread::State::meets))
        continue;
      if (++lines > 60) std::abort();
      std::fprintf(stderr, "  block %u,%u,%u of a grid of %u,%u,%u, thread %u: %s\n", thread.place.block.x,
                   thread.place.block.y, thread.place.block.z, thread.place.grid_dim.x, thread.place.grid_dim.y,
                   thread.place.grid_dim.z, thread.place.thread.x, description(thread));
    }
  std::abort();
}

}  // namespace

void finish_work(Device& device) {
  constexpr int kPatience = 20000;  // polls of all threads
  int without_progress = 0;
  while (start(device)) {
    if (device.blocks.empty()) continue;
    const long long before = progress;
    const std::size_t at = random_below(device.blocks.size());
    Block& block = *device.blocks[at];
    const bool ran = block.run();
    if (block.alive == 0) {
      while (block.copies.empty() && block.land_a_copy(true)) continue;
      retire(device, at);
    } else if (!ran || random_below(4) == 0) {
      // Copies complete at random times, and at the latest when no thread can continue without them.
      for (unsigned i = 1 + random_below(8); i > 0 && block.land_a_copy(!ran); --i) continue;
    }
    without_progress = progress == before ? without_progress + 1 : 0;
    if (without_progress > kPatience) report_deadlock(device);
  }
}

}  // namespace kvq::emulator
