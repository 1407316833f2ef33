#pragma once

#include <kvq/core/status.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

struct CUstream_st;

namespace kvq::bench {

/// @throws Error{unsupported} or Error{internal} if `status` reports a failed runtime call
void check(const Status& status);

/// The GPU, driver and clocks on which the numbers were measured.
struct Machine {
  std::string gpu, driver;
  int compute_capability = 0;                                    ///< 90 for 9.0
  int cuda_runtime = 0, cuda_driver = 0;                         ///< 13000 for 13.0
  int multiprocessors = 0, clock_mhz = 0, memory_clock_mhz = 0;  ///< highest clocks
  std::size_t memory_bytes = 0, l2_bytes = 0;
};

/// Time of one call, from replays of a CUDA graph that holds `calls` calls.
struct Timing {
  double median_us = 0.0, min_us = 0.0, max_us = 0.0;
  int calls = 0, replays = 0;
  /// Half of the range of the replays, relative to the median.
  double spread() const { return (max_us - min_us) / (2.0 * median_us); }
};

/// A GPU and a stream on it.
class Device {
 public:
  /// @throws Error{unsupported} if the machine has no such device
  explicit Device(int index);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Machine& machine() const { return machine_; }
  CUstream_st* stream() const { return stream_; }
  /// Waits for all work on the device. @throws Error{internal} if a kernel failed
  void synchronize() const;
  /// Captures launch(0), ..., launch(calls - 1) in one graph and times replays. launch(i) puts call i on stream().
  Timing time(int calls, const std::function<void(int)>& launch) const;

 private:
  Machine machine_;
  CUstream_st* stream_ = nullptr;
};

/// Device memory; the destructor frees all buffers.
class Memory {
 public:
  Memory() = default;
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  /// Allocates an uninitialized buffer, 256-byte aligned.
  /// @throws Error{io} with the free bytes if the device has not enough
  template <typename T>
  T* take(std::size_t count) {
    return static_cast<T*>(take_bytes(count * sizeof(T)));
  }
  template <typename T>
  T* put(const std::vector<T>& values) {
    T* to = take<T>(values.size());
    put_bytes(to, values.data(), values.size() * sizeof(T));
    return to;
  }
  template <typename T>
  T* zeros(std::size_t count) {
    return static_cast<T*>(fill_bytes(take<T>(count), 0, count * sizeof(T)));
  }
  /// Allocates a buffer and fills each byte with 0xFF, which is NaN in every floating-point type.
  template <typename T>
  T* poisoned(std::size_t count) {
    return static_cast<T*>(fill_bytes(take<T>(count), 0xFF, count * sizeof(T)));
  }

 private:
  void* take_bytes(std::size_t bytes);
  static void put_bytes(void* to, const void* from, std::size_t bytes);
  static void* fill_bytes(void* to, int value, std::size_t bytes);
  std::vector<void*> all_;
};

/// Waits for all work on the device, then copies to the host.
void get_bytes(void* to, const void* from, std::size_t bytes);
template <typename T>
std::vector<T> get(const T* from, std::size_t count) {
  std::vector<T> values(count);
  get_bytes(values.data(), from, count * sizeof(T));
  return values;
}

/// Copies between device buffers on the device's stream, also inside a graph.
void copy_async(const Device& device, void* to, const void* from, std::size_t bytes);

}  // namespace kvq::bench
