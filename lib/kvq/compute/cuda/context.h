#pragma once

#include <kvq/compute/cuda/check.h>
#include <kvq/compute/cuda/kernels.h>

#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

namespace kvq::cuda {

/// Device memory that is kept from call to call and grows as needed.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }

  /// The memory, with room for so many T; what it held may be lost.
  template <typename T>
  T* room(std::size_t count, const char* what) {
    const std::size_t bytes = count * sizeof(T);
    if (bytes > bytes_) {
      cudaFree(data_);
      data_ = nullptr, bytes_ = 0;
      check(cudaMalloc(&data_, bytes), what);
      bytes_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// One device: its stream, the handles of its libraries, and memory. A thread that uses it calls use() before.
class Context {
 public:
  explicit Context(int device);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  void use() const { check(cudaSetDevice(device_), "choice of the device"); }
  int device() const { return device_; }
  const std::string& name() const { return name_; }
  CUstream_st* stream() const { return stream_; }
  cublasHandle_t blas() const { return blas_; }
  cusolverDnHandle_t solver() const { return solver_; }

  /// Copies rows of `row` bytes, `pitch` apart on the host, to the device. Pieces go through pinned memory: threads
  /// fill one piece while the device takes the other, which is faster than a copy of memory that is not pinned.
  void upload_rows(std::byte* to, const std::byte* from, std::size_t row, std::size_t pitch, std::size_t rows,
                   const char* what);
  /// Copies to the device into `buffer`.
  template <typename T>
  T* upload(Buffer& buffer, const T* data, std::size_t count, const char* what) {
    T* to = buffer.room<T>(count, what);
    upload_rows(reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(data), count * sizeof(T),
                count * sizeof(T), count > 0 ? 1 : 0, what);
    return to;
  }
  /// Copies to the host, when all earlier work of the stream has ended.
  template <typename T>
  std::vector<T> download(const T* data, std::size_t count, const char* what) {
    std::vector<T> result(count);
    check(cudaMemcpyAsync(result.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost, stream_), what);
    check(cudaStreamSynchronize(stream_), what);
    return result;
  }

  // Memory, by what it holds.
  Buffer rows, keys, values, weights, counts, sinks;        // as the caller has them
  Buffer parts_q, parts_k, parts_v;                         // Parts
  Buffer plain, weighted, products, means, sums, matrices;  // double
  Buffer outputs, softmax, norms, scores, forms, columns;   // of attention
  Buffer groups, tasks;                                     // of codecs
  Buffer clusters;                                          // of k-means and sorts
  Buffer solver_memory, status;

  std::mutex mutex;  ///< held by the thread that uses the context

 private:
  int device_;
  std::string name_;
  CUstream_st* stream_ = nullptr;
  cublasHandle_t blas_ = nullptr;
  cusolverDnHandle_t solver_ = nullptr;
  std::byte* pinned_[2] = {};
  cudaEvent_t taken_[2] = {};  ///< the device has copied a piece
  int piece_ = 0;
};

}  // namespace kvq::cuda
