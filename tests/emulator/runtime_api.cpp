#include <emulator/machine.h>

#include <cfenv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

// The part of CUDA's runtime API that kvq uses, on the emulated devices. Kernels run when the host waits for them.

struct CUgraph_st {
  struct Node {
    std::shared_ptr<kvq::emulator::Launch> launch;
    std::function<void()> on_host;
  };
  std::vector<Node> nodes;
};
struct CUgraphExec_st {
  CUgraph_st graph;
};
struct CUstream_st {
  int device = 0;
  CUgraph_st* captured = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  bool spoilt = false;  ///< the capture is invalid, because of a call that cannot be in a graph
};

namespace kvq::emulator {

namespace {

std::recursive_mutex all;  // one host thread at a time
Device devices[kDevices];
std::set<cudaStream_t> capturing;
thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
Device& device_of(cudaStream_t stream) { return devices[stream ? stream->device : current]; }

/// Orders the default stream with the others: work of one begins only when earlier work of the other has ended.
void keep_order(Device& device, cudaStream_t stream) {
  for (const auto& [id, other] : device.streams)
    if (id != stream && (id == nullptr || stream == nullptr) && !other.queue.empty()) return finish_work(device);
}
cudaError_t enqueue(cudaStream_t stream, CUgraph_st::Node node) {
  const std::lock_guard lock(all);
  if (stream && stream->captured) {
    if (stream->spoilt) return failed(cudaErrorStreamCaptureInvalidated);
    stream->captured->nodes.push_back(std::move(node));
    return cudaSuccess;
  }
  Device& device = device_of(stream);
  keep_order(device, stream);
  Operation operation;
  if (node.launch) {
    operation.grid = std::make_shared<Grid>();
    operation.grid->launch = *node.launch;
  } else {
    operation.on_host = std::move(node.on_host);
  }
  device.streams[stream].queue.push_back(std::move(operation));
  return cudaSuccess;
}
cudaError_t synchronize() {
  const std::lock_guard lock(all);
  for (Device& device : devices) finish_work(device);
  return cudaSuccess;
}
cudaError_t at_once(const std::function<void()>& act) {
  const std::lock_guard lock(all);
  for (const cudaStream_t stream : capturing)
    if (stream->mode == cudaStreamCaptureModeGlobal)
      return stream->spoilt = true, failed(cudaErrorStreamCaptureUnsupported);
  synchronize();
  act();
  return cudaSuccess;
}

}  // namespace

cudaError_t launch(cudaStream_t stream, Launch launch) {
  if (launch.grid.x == 0 || launch.grid.y == 0 || launch.grid.z == 0 || launch.grid.y > 65535 ||
      launch.grid.z > 65535 || launch.block.x > 1024 || launch.shared_bytes > kSharedPerBlock)
    return failed(cudaErrorInvalidConfiguration);
  return enqueue(stream, {std::make_shared<Launch>(std::move(launch)), {}});
}

}  // namespace kvq::emulator

using namespace kvq::emulator;

// ---- Shared memory: what -femulated-tls makes of a thread_local variable ------------------------------------------

/// Control structure of a variable, as the compiler lays it out.
struct EmulatedVariable {
  std::size_t bytes, alignment;
  void* place;
  void* initial;
};
extern "C" void* __emutls_get_address(EmulatedVariable* variable) {
  // `extern __shared__` arrays (dynamic_shared.cpp) are a block's dynamic shared memory, where its window begins.
  if (variable->bytes >= kSharedBytes) return shared_window();
  return static_shared(variable, variable->bytes, variable->alignment);
}

// ---- Numbers that need another rounding ---------------------------------------------------------------------------

namespace {
/// @param mode  of <cfenv>
template <typename Compute>
float rounded(int mode, Compute compute) {
  std::fesetround(mode);
  const float result = compute();
  std::fesetround(FE_TONEAREST);
  return result;
}
}  // namespace
float __fadd_rd(float a, float b) {
  const volatile float x = a, y = b;
  return rounded(FE_DOWNWARD, [&]() -> float {
    volatile float sum = x + y;
    return sum;
  });
}
float __fmaf_rd(float a, float b, float c) {
  const volatile float x = a, y = b, z = c;
  return rounded(FE_DOWNWARD, [&]() -> float {
    volatile float sum = std::fma(x, y, z);
    return sum;
  });
}
float __double2float_ru(double x) {
  const volatile double from = x;
  return rounded(FE_UPWARD, [&]() -> float {
    volatile float result = static_cast<float>(from);
    return result;
  });
}

// ---- Devices -----------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) { return *count = kDevices, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = current, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return failed(cudaErrorInvalidDevice);
  return current = device, cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= kDevices) return failed(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = kMultiprocessors; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(kSharedPerBlock); break;
    case cudaDevAttrComputeCapabilityMajor: *value = KVQ_EMULATED_ARCH / 100; break;
    case cudaDevAttrComputeCapabilityMinor: *value = KVQ_EMULATED_ARCH / 10 % 10; break;
    default: return failed(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess                 ? "no error"
         : error == cudaErrorMemoryAllocation ? "out of memory"
                                              : "error of an emulated device";
}
cudaError_t cudaDeviceSynchronize() { return synchronize(); }

// ---- Memory ------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  const cudaError_t error = at_once([] {});
  if (error != cudaSuccess) return error;
  // Not rounded up as aligned_alloc asks for, so that AddressSanitizer sees the first byte behind the allocation.
  *pointer = nullptr;
  if (bytes > std::size_t{1} << 34 || ::posix_memalign(pointer, 256, std::max<std::size_t>(bytes, 1)) != 0)
    return failed(cudaErrorMemoryAllocation);
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  return at_once([&] { std::free(pointer); });
}
namespace {

/// Copies; pointers of an empty copy may be null.
void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memmove(to, from, bytes);
}

}  // namespace

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  return at_once([&] { copy(to, from, bytes); });
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  return at_once([&] {
    if (bytes > 0) std::memset(to, value, bytes);
  });
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return enqueue(stream, {nullptr, [=] { copy(to, from, bytes); }});
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return enqueue(stream, {nullptr, [=] {
                            if (bytes > 0) std::memset(to, value, bytes);
                          }});
}

// ---- Streams, graphs, events --------------------------------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new CUstream_st{current};
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return at_once([&] {
    device_of(stream).streams.erase(stream);
    delete stream;
  });
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream && stream->captured) return stream->spoilt = true, failed(cudaErrorStreamCaptureUnsupported);
  return synchronize();
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const std::lock_guard lock(all);
  if (!stream || stream->captured) return failed(cudaErrorStreamCaptureUnsupported);
  stream->captured = new CUgraph_st, stream->mode = mode, stream->spoilt = false;
  capturing.insert(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const std::lock_guard lock(all);
  capturing.erase(stream);
  *graph = std::exchange(stream->captured, nullptr);
  if (*graph && !stream->spoilt) return cudaSuccess;
  delete std::exchange(*graph, nullptr);
  return failed(cudaErrorStreamCaptureInvalidated);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* runnable, cudaGraph_t graph, unsigned long long) {
  *runnable = new CUgraphExec_st{*graph};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t runnable, cudaStream_t stream) {
  for (const CUgraph_st::Node& node : runnable->graph.nodes) enqueue(stream, node);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t runnable) {
  return at_once([&] { delete runnable; });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }

// ---- Kernels -----------------------------------------------------------------------------------------------------

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->ptxVersion = attributes->binaryVersion = KVQ_EMULATED_ARCH / 10;
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > static_cast<int>(kSharedPerBlock))
    return failed(cudaErrorInvalidValue);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, std::size_t bytes) {
  *blocks = std::min({static_cast<int>(kSharedPerMultiprocessor / (bytes + kSharedReserved)),
                      kThreadsPerMultiprocessor / std::max(threads, 1), kBlocksPerMultiprocessor});
  return cudaSuccess;
}
