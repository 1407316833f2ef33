#pragma once

#include <kvq/compute/cuda/check.h>
#include <kvq/compute/cuda/kernels.h>
#include <kvq/compute/device_memory.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

namespace kvq::cuda {

/// One device: its stream, the handles of its libraries, and memory. A thread that uses it calls use() before.
class Context {
 public:
  /// @param memory  of the device; outlives the context
  Context(int device, DeviceMemory& memory);
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

  /// download() of few numbers that a loop waits for. The thread keeps its processor for a while, because to sleep and
  /// wake takes longer than a step of the loop.
  template <typename T>
  std::vector<T> download_soon(const T* data, std::size_t count, const char* what) {
    if (count * sizeof(T) > kPieceBytes) return download(data, count, what);
    check(cudaEventSynchronize(taken_[piece_]), what);
    check(cudaMemcpyAsync(pinned_[piece_], data, count * sizeof(T), cudaMemcpyDeviceToHost, stream_), what);
    const auto start = std::chrono::steady_clock::now();
    while (cudaStreamQuery(stream_) == cudaErrorNotReady &&
           std::chrono::steady_clock::now() - start < std::chrono::milliseconds(2)) {
    }
    static_cast<void>(cudaGetLastError());  // "not ready" is no error
    check(cudaStreamSynchronize(stream_), what);
    const T* from = reinterpret_cast<const T*>(pinned_[piece_]);
    return {from, from + count};
  }
  /// Copies units to the host in pinned pieces and calls take(first, count, units) for each piece in order, while the
  /// device copies the next one.
  template <typename T, typename F>
  void download_units(const T* from, std::size_t unit, std::size_t units, F take, const char* what) {
    const std::size_t at_once = kPieceBytes / (unit * sizeof(T));
    if (at_once == 0) {
      for (std::size_t i = 0; i < units; ++i) take(i, 1, download(from + i * unit, unit, what).data());
      return;
    }
    const auto copy = [&](std::size_t first, int piece) {
      const std::size_t count = std::min(at_once, units - first);
      check(cudaEventSynchronize(taken_[piece]), what);
      check(cudaMemcpyAsync(pinned_[piece], from + first * unit, count * unit * sizeof(T), cudaMemcpyDeviceToHost,
                            stream_),
            what);
      check(cudaEventRecord(taken_[piece], stream_), what);
    };
    if (units > 0) copy(0, piece_);
    for (std::size_t first = 0; first < units; first += at_once, piece_ ^= 1) {
      if (first + at_once < units) copy(first + at_once, piece_ ^ 1);
      check(cudaEventSynchronize(taken_[piece_]), what);
      take(first, std::min(at_once, units - first), reinterpret_cast<const T*>(pinned_[piece_]));
    }
  }

  std::mutex mutex;  ///< held by the thread that uses the context
  Lane lane;         ///< of all memory that is used under this mutex

  // Memory, by what it holds. A verb makes a Claim before it uses any.
  Buffer rows{lane}, keys{lane}, values{lane}, weights{lane}, counts{lane}, sinks{lane};  // as the caller has them
  Buffer parts_q{lane}, parts_k{lane}, parts_v{lane};                                     // Parts
  Buffer plain{lane}, weighted{lane}, products{lane}, means{lane}, sums{lane}, matrices{lane};  // double
  Buffer outputs{lane}, softmax{lane}, norms{lane}, scores{lane}, forms{lane}, columns{lane};   // of attention
  Buffer groups{lane}, tasks{lane};                                                             // of codecs
  Buffer clusters{lane};                                                                        // of k-means and sorts
  Buffer solver_memory{lane}, status{lane};

 private:
  int device_;
  std::string name_;
  CUstream_st* stream_ = nullptr;
  cublasHandle_t blas_ = nullptr;
  cusolverDnHandle_t solver_ = nullptr;
  static constexpr std::size_t kPieceBytes = std::size_t{16} << 20;
  std::byte* pinned_[2] = {};
  cudaEvent_t taken_[2] = {};  ///< the device has copied a piece
  int piece_ = 0;
};

}  // namespace kvq::cuda
