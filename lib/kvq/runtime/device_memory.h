#pragma once

#include <kvq/core/error.h>

#include <cuda_runtime.h>

#include <cstddef>
#include <span>
#include <utility>

namespace kvq {

/// A call of the CUDA runtime failed; the message has the reason.
struct CudaError : Error {
  CudaError(const char* what, cudaError_t error)
      : Error(ErrorKind::internal, fmt::format("{}: {}", what, cudaGetErrorString(error))) {}
};

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw CudaError(what, error);
}

/// Device memory that is freed with its owner. For the few parts of kvq that allocate: self-test, PagedCache, tools.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::size_t bytes) : bytes_(bytes) {
    if (bytes > 0) check_cuda(cudaMalloc(&data_, bytes), "cudaMalloc");
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(DeviceMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  template <typename T = std::byte>
  T* get() const {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Copies host values to new device memory; waits for the stream.
template <typename T>
DeviceMemory to_device(std::span<const T> values, cudaStream_t stream) {
  DeviceMemory memory(values.size_bytes());
  if (!values.empty())
    check_cuda(cudaMemcpyAsync(memory.get(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice, stream),
               "cudaMemcpy");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return memory;
}

template <typename T>
void to_host(const DeviceMemory& memory, std::span<T> values, cudaStream_t stream) {
  if (!values.empty())
    check_cuda(cudaMemcpyAsync(values.data(), memory.get(), values.size_bytes(), cudaMemcpyDeviceToHost, stream),
               "cudaMemcpy");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

}  // namespace kvq
