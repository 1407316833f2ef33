#include "bench/device.h"

#include <kvq/core/error.h>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <regex>

namespace kvq::bench {

namespace {

constexpr int kReplays = 15, kWarmUps = 3;

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw Error{ErrorKind::internal, fmt::format("{}: {}", what, cudaGetErrorString(error))};
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

/// Version of the kernel module, from /proc, because the CUDA runtime does not report it.
std::string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  std::getline(file, line);
  std::smatch version;
  return std::regex_search(line, version, std::regex("[0-9]+\\.[0-9]+(\\.[0-9]+)?")) ? version.str() : "unknown";
}

Machine describe(int device) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  Machine m;
  m.gpu = properties.name, m.driver = driver_version();
  m.compute_capability = 10 * properties.major + properties.minor;
  check(cudaRuntimeGetVersion(&m.cuda_runtime), "cudaRuntimeGetVersion");
  check(cudaDriverGetVersion(&m.cuda_driver), "cudaDriverGetVersion");
  m.multiprocessors = properties.multiProcessorCount;
  m.clock_mhz = attribute(cudaDevAttrClockRate, device) / 1000;
  m.memory_clock_mhz = attribute(cudaDevAttrMemoryClockRate, device) / 1000;
  m.memory_bytes = properties.totalGlobalMem, m.l2_bytes = static_cast<std::size_t>(properties.l2CacheSize);
  return m;
}

struct Graph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t runnable = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  ~Graph() {
    if (runnable) cudaGraphExecDestroy(runnable);
    if (graph) cudaGraphDestroy(graph);
    if (begin) cudaEventDestroy(begin);
    if (end) cudaEventDestroy(end);
  }
};

}  // namespace

void check(const Status& status) {
  if (!status.ok())
    throw Error{status.code() == StatusCode::cuda ? ErrorKind::internal : ErrorKind::unsupported, status.message()};
}

Device::Device(int index) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || index >= count)
    throw Error{ErrorKind::unsupported,
                count > 0 ? fmt::format("no CUDA device {}, found {}", index, count)
                          : fmt::format("no CUDA device: {}", cudaGetErrorString(error)),
                "--dry-run says what would be measured, without one"};
  check(cudaSetDevice(index), "cudaSetDevice");
  machine_ = describe(index);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
}

Device::~Device() { cudaStreamDestroy(stream_); }

void Device::synchronize() const { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

Timing Device::time(int calls, const std::function<void(int)>& launch) const {
  synchronize();
  Graph g;
  check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  for (int i = 0; i < calls; ++i) launch(i);
  check(cudaStreamEndCapture(stream_, &g.graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&g.runnable, g.graph, 0), "cudaGraphInstantiate");
  check(cudaEventCreate(&g.begin), "cudaEventCreate");
  check(cudaEventCreate(&g.end), "cudaEventCreate");
  std::vector<double> times;
  for (int i = 0; i < kWarmUps + kReplays; ++i) {
    check(cudaEventRecord(g.begin, stream_), "cudaEventRecord");
    check(cudaGraphLaunch(g.runnable, stream_), "cudaGraphLaunch");
    check(cudaEventRecord(g.end, stream_), "cudaEventRecord");
    check(cudaStreamSynchronize(stream_), "cudaGraphLaunch");
    float milliseconds = 0.0f;
    check(cudaEventElapsedTime(&milliseconds, g.begin, g.end), "cudaEventElapsedTime");
    if (i >= kWarmUps) times.push_back(static_cast<double>(milliseconds) * 1000.0 / calls);
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front(), times.back(), calls, kReplays};
}

Memory::~Memory() {
  for (void* p : all_) cudaFree(p);
}

void* Memory::take_bytes(std::size_t bytes) {
  void* p = nullptr;
  if (cudaMalloc(&p, std::max<std::size_t>(bytes, 1)) != cudaSuccess) {
    cudaGetLastError();
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    throw Error{ErrorKind::io,
                fmt::format("the GPU has no room for {:.1f} GB more: {:.1f} of {:.1f} GB are free",
                            static_cast<double>(bytes) / 1e9, static_cast<double>(free) / 1e9,
                            static_cast<double>(total) / 1e9),
                "take a smaller --batch or --context; --dry-run shows sizes"};
  }
  all_.push_back(p);
  return p;
}

void Memory::put_bytes(void* to, const void* from, std::size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
}

void* Memory::fill_bytes(void* to, int value, std::size_t bytes) {
  check(cudaMemset(to, value, bytes), "cudaMemset");
  return to;
}

void get_bytes(void* to, const void* from, std::size_t bytes) {
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}

void copy_async(const Device& device, void* to, const void* from, std::size_t bytes) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, device.stream()), "cudaMemcpyAsync");
}

}  // namespace kvq::bench
