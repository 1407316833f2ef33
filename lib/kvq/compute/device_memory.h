#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace kvq {

// The memory of a device, counted and kept below a limit.
//
// A thread that uses a device holds the mutex of a lane: a stream, its handles, and Buffers. Before a verb uses
// buffers it makes a Claim: how much it takes at the least, and how much would be best. The claim waits until so much
// is free, and the verb divides its work by what it got. Buffers keep their memory when the claim ends, so that
// the next call needs no allocation; but from then on they are a cache, which other claims may empty. So threads that
// wait hold nothing, and no order of calls locks up.

/// What a verb takes of a device's memory, in bytes.
struct Need {
  std::int64_t smallest = 0;  ///< for the smallest batch
  std::int64_t wanted = 0;    ///< for as large a batch as is of use
  const char* what = "";      ///< the step, for errors
};

class Buffer;
class Claim;
class Lane;

class DeviceMemory {
 public:
  /// How memory is had: functions of CUDA, or of a test.
  struct Allocator {
    void* (*take)(std::size_t bytes, const char* what);
    void (*give_back)(void* memory);
  };

  /// @param limit   bytes that all buffers together may take
  /// @param beside  bytes that the device gives to what is not counted: errors and most_used() include them
  DeviceMemory(std::int64_t limit, std::int64_t beside, Allocator allocator)
      : limit_(limit), beside_(beside), allocator_(allocator) {}
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::int64_t limit() const { return limit_; }
  /// The most bytes that buffers have had together so far, and those beside them.
  std::int64_t most_used() const;

 private:
  friend class Buffer;
  friend class Claim;
  friend class Lane;

  std::int64_t free() const { return limit_ - held_ - promised_; }
  void* take(Lane& lane, std::size_t bytes, const char* what);
  void give_back(Lane& lane, void* memory, std::size_t bytes);
  /// Empties the buffers of a lane that nobody uses, other than `own`. @return  whether there was one
  bool empty_idle_lane(const Lane& own);
  void empty(Lane& lane);
  [[noreturn]] void refuse(std::int64_t needed, const char* what) const;

  const std::int64_t limit_, beside_;
  const Allocator allocator_;
  mutable std::mutex mutex_;   ///< of all below, and of what lanes, pools and buffers know of each other
  std::int64_t held_ = 0;      ///< by buffers
  std::int64_t promised_ = 0;  ///< to claims, beyond what their buffers hold
  std::int64_t most_held_ = 0;
  std::vector<Lane*> lanes_;
  std::condition_variable changed_;  ///< a claim has ended
};

/// Buffers that are used under one mutex.
class Lane {
 public:
  /// @param mutex  held by the thread that makes a claim or uses a buffer
  Lane(DeviceMemory& memory, std::mutex& mutex);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  DeviceMemory& memory() const { return memory_; }

 private:
  friend class Buffer;
  friend class Claim;
  friend class DeviceMemory;

  DeviceMemory& memory_;
  std::mutex& mutex_;
  std::vector<Buffer*> buffers_;
  std::int64_t held_ = 0, promised_ = 0;
  bool is_claimed_ = false;
};

/// Device memory that is kept from call to call and grows as needed. A claim may empty it before the claim begins.
class Buffer {
 public:
  explicit Buffer(Lane& lane);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  /// The memory, with room for so many T; what it held may be lost.
  template <typename T>
  T* room(std::size_t count, const char* what) {
    const std::size_t bytes = count * sizeof(T);
    if (bytes > bytes_) grow(bytes, what);
    return static_cast<T*>(data_);
  }
  bool is_empty() const { return data_ == nullptr; }

 private:
  friend class DeviceMemory;
  void grow(std::size_t bytes, const char* what);

  Lane& lane_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Memory that the buffers of a lane may take until the claim ends. One claim of a lane at a time; the lane's mutex is
/// held. It waits for other claims to end, if they hold too much for the smallest batch.
class Claim {
 public:
  /// @throws Error{unsupported}, which says how much is needed, if the limit has no room for the smallest batch
  Claim(Lane& lane, const Need& need);
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  /// At least Need::smallest.
  std::int64_t bytes() const { return bytes_; }

 private:
  Lane& lane_;
  std::int64_t bytes_ = 0;
};

/// How many of `count` units one batch has, if a batch of n units takes `fixed + n * each` bytes: at least 1.
constexpr std::int64_t units_at_once(std::int64_t bytes, std::int64_t fixed, std::int64_t each, std::int64_t count) {
  const std::int64_t fit = each > 0 ? (bytes - fixed) / each : count;
  return fit < 1 ? 1 : fit < count ? fit : count;
}

}  // namespace kvq
