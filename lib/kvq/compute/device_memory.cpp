#include <kvq/compute/device_memory.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <chrono>
#include <cmath>

namespace kvq {

namespace {

/// Devices hand out memory in such pieces.
constexpr std::size_t kPiece = 256;
/// What the buffers of a claim take beyond what they were asked for, as pieces.
constexpr std::int64_t kSlack = 64 * kPiece;

/// In GB, rounded up so that a limit of this size is enough.
std::string gigabytes(std::int64_t bytes) {
  return fmt::format("{:.2f}GB", std::ceil(static_cast<double>(bytes) / 1e7) / 100.0);
}

}  // namespace

std::int64_t DeviceMemory::most_used() const {
  const std::lock_guard lock(mutex_);
  return most_held_ + beside_;
}

void DeviceMemory::refuse(std::int64_t needed, const char* what) const {
  const std::string enough = gigabytes(needed + beside_);
  throw Error{
      ErrorKind::unsupported,
      fmt::format("CUDA device: {}: expected room for at least {} of device memory, found {:.2f}GB", what, enough,
                  std::floor(static_cast<double>(limit_ + beside_) / 1e7) / 100.0),
      fmt::format("--mem-limit {}, if the device has so much, or fewer tokens; --device cpu needs no GPU", enough)};
}

void* DeviceMemory::take(Lane& lane, std::size_t bytes, const char* what) {
  const auto size = static_cast<std::int64_t>(bytes);
  // What a verb did not claim.
  while (free() + lane.promised_ < size)
    if (!empty_idle_lane(lane)) refuse(held_ + promised_ - lane.promised_ + size, what);
  void* memory = allocator_.take(bytes, what);
  const std::int64_t kept = std::min(lane.promised_, size);
  lane.promised_ -= kept, promised_ -= kept;
  lane.held_ += size, held_ += size;
  most_held_ = std::max(most_held_, held_);
  return memory;
}

void DeviceMemory::give_back(Lane& lane, void* memory, std::size_t bytes) {
  allocator_.give_back(memory);
  const auto size = static_cast<std::int64_t>(bytes);
  lane.held_ -= size, held_ -= size;
  if (lane.is_claimed_) lane.promised_ += size, promised_ += size;
}

void DeviceMemory::empty(Lane& lane) {
  for (Buffer* buffer : lane.buffers_) {
    if (buffer->data_) give_back(lane, buffer->data_, buffer->bytes_);
    buffer->data_ = nullptr, buffer->bytes_ = 0;
  }
}

bool DeviceMemory::empty_idle_lane(const Lane& own) {
  for (Lane* lane : lanes_) {
    if (lane == &own || lane->held_ == 0) continue;
    const std::unique_lock idle(lane->mutex_, std::try_to_lock);
    if (!idle) continue;
    empty(*lane);
    return true;
  }
  return false;
}

Lane::Lane(DeviceMemory& memory, std::mutex& mutex) : memory_(memory), mutex_(mutex) {
  const std::lock_guard lock(memory_.mutex_);
  memory_.lanes_.push_back(this);
}

Lane::~Lane() {
  const std::lock_guard lock(memory_.mutex_);
  std::erase(memory_.lanes_, this);
}

Buffer::Buffer(Lane& lane) : lane_(lane) {
  const std::lock_guard lock(lane_.memory_.mutex_);
  lane_.buffers_.push_back(this);
}

Buffer::~Buffer() {
  const std::lock_guard lock(lane_.memory_.mutex_);
  std::erase(lane_.buffers_, this);
  if (data_) lane_.memory_.give_back(lane_, data_, bytes_);
}

void Buffer::grow(std::size_t bytes, const char* what) {
  DeviceMemory& memory = lane_.memory_;
  const std::lock_guard lock(memory.mutex_);
  if (data_) memory.give_back(lane_, data_, bytes_);
  data_ = nullptr, bytes_ = 0;
  bytes = (bytes + kPiece - 1) / kPiece * kPiece;
  data_ = memory.take(lane_, bytes, what);
  bytes_ = bytes;
}

Claim::Claim(Lane& lane, const Need& need) : lane_(lane) {
  DeviceMemory& memory = lane.memory_;
  std::unique_lock lock(memory.mutex_);
  KVQ_ASSERT(!lane.is_claimed_ && need.smallest <= need.wanted);
  const std::int64_t smallest = need.smallest + kSlack, wanted = need.wanted + kSlack;
  if (smallest > memory.limit_) memory.refuse(smallest, need.what);
  // Caches go first, the lane's own ones last: in most cases the verb uses them again.
  while (memory.free() < wanted && memory.empty_idle_lane(lane)) continue;
  if (memory.free() < wanted) memory.empty(lane);
  // A thread may hold its lane's mutex for a moment without a claim. No notification follows, so look again soon.
  while (memory.free() < smallest)
    if (!memory.empty_idle_lane(lane)) memory.changed_.wait_for(lock, std::chrono::milliseconds(5));
  const std::int64_t granted = std::min(memory.free(), wanted);
  lane.is_claimed_ = true;
  lane.promised_ += granted, memory.promised_ += granted;
  bytes_ = granted - kSlack;
}

Claim::~Claim() {
  DeviceMemory& memory = lane_.memory_;
  const std::lock_guard lock(memory.mutex_);
  memory.promised_ -= lane_.promised_;
  lane_.promised_ = 0, lane_.is_claimed_ = false;
  memory.changed_.notify_all();
}

}  // namespace kvq
