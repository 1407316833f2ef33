#pragma once

#include <kvq/device/launch.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace kvq::test {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

/// Threads of a block of a plain kernel: few on the emulated device, where beginning and switching threads costs more
/// than their work.
#ifdef KVQ_EMULATED_ARCH
constexpr int kPlainThreads = 32;
#else
constexpr int kPlainThreads = 128;
#endif

/// Runs a kernel to its end.
template <typename... Parameters>
void run_kernel(const char* what, void (*kernel)(Parameters...), dim3 grid, int threads,
                std::type_identity_t<Parameters>... arguments) {
  check(launch_kernel(kernel, grid, threads, 0, false, nullptr, arguments...), what);
  check(cudaDeviceSynchronize(), what);
}

/// A graph of what `record` puts on a stream.
class RecordedGraph {
 public:
  template <typename Record>
  RecordedGraph(cudaStream_t stream, Record record) : stream_(stream) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    record();
    check(cudaStreamEndCapture(stream, &graph_), "capture");
    check(cudaGraphInstantiate(&runnable_, graph_, 0), "cudaGraphInstantiate");
  }
  ~RecordedGraph() {
    cudaGraphExecDestroy(runnable_);
    cudaGraphDestroy(graph_);
  }
  RecordedGraph(const RecordedGraph&) = delete;
  RecordedGraph& operator=(const RecordedGraph&) = delete;

  /// Runs the graph to its end.
  void launch() const {
    check(cudaGraphLaunch(runnable_, stream_), "cudaGraphLaunch");
    check(cudaStreamSynchronize(stream_), "cudaGraphLaunch");
  }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t runnable_ = nullptr;
};

/// Device memory of one call.
class Arena {
 public:
  ~Arena() {
    for (void* p : all_) cudaFree(p);
  }
  template <typename T>
  T* take(std::size_t count, int fill) {
    void* p = nullptr;
    const std::size_t bytes = std::max<std::size_t>(count, 1) * sizeof(T);
    check(cudaMalloc(&p, bytes), "cudaMalloc");
    all_.push_back(p);
    check(cudaMemset(p, fill, bytes), "cudaMemset");
    return static_cast<T*>(p);
  }
  template <typename T>
  T* put(const std::vector<T>& values) {
    T* p = take<T>(values.size(), 0);
    check(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    return p;
  }

 private:
  std::vector<void*> all_;
};

template <typename T>
std::vector<T> get(const T* from, std::size_t count) {
  std::vector<T> values(count);
  check(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return values;
}

}  // namespace kvq::test
