#include <kvq/compute/cuda/context.h>
#include <kvq/compute/parallel.h>

#include <algorithm>
#include <cstring>

namespace kvq::cuda {

namespace {

constexpr std::size_t kThreadBytes = std::size_t{1} << 20;  // that one thread copies at a time

/// Copies bytes [first, first + count) of the rows, as if they followed each other.
void copy_range(std::byte* to, const std::byte* from, std::size_t row, std::size_t pitch, std::size_t first,
                std::size_t count) {
  while (count > 0) {
    const std::size_t in_row = first % row, now = std::min(count, row - in_row);
    std::memcpy(to, from + first / row * pitch + in_row, now);
    to += now, first += now, count -= now;
  }
}

}  // namespace

Context::Context(int device, DeviceMemory& memory) : lane(memory, mutex), device_(device) {
  use();
  // Threads that wait for the device leave their processors to others.
  check(cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync), "waiting for the device");
  cudaDeviceProp properties = {};
  check(cudaGetDeviceProperties(&properties, device), "properties of the device");
  name_ = properties.name;
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
  check(cublasCreate(&blas_), "cuBLAS");
  check(cublasSetStream(blas_, stream_), "cuBLAS");
  // Sums in one order: the same bytes from run to run.
  check(cublasSetAtomicsMode(blas_, CUBLAS_ATOMICS_NOT_ALLOWED), "cuBLAS");
  check(cusolverDnCreate(&solver_), "cuSOLVER");
  check(cusolverDnSetStream(solver_, stream_), "cuSOLVER");
  for (int i = 0; i < 2; ++i) {
    check(cudaMallocHost(&pinned_[i], kPieceBytes), "pinned memory");
    check(cudaEventCreateWithFlags(&taken_[i], cudaEventDisableTiming), "event");
  }
}

Context::~Context() {
  cudaSetDevice(device_);
  for (int i = 0; i < 2; ++i) {
    cudaFreeHost(pinned_[i]);
    if (taken_[i]) cudaEventDestroy(taken_[i]);
  }
  if (solver_) cusolverDnDestroy(solver_);
  if (blas_) cublasDestroy(blas_);
  if (stream_) cudaStreamDestroy(stream_);
}

void Context::upload_rows(std::byte* to, const std::byte* from, std::size_t row, std::size_t pitch, std::size_t rows,
                          const char* what) {
  if (pitch == row) row *= rows, rows = rows > 0 ? 1 : 0;
  const std::size_t bytes = row * rows;
  for (std::size_t first = 0; first < bytes; first += kPieceBytes) {
    const std::size_t count = std::min(kPieceBytes, bytes - first);
    std::byte* piece = pinned_[piece_];
    check(cudaEventSynchronize(taken_[piece_]), what);
    const auto parts = static_cast<std::int64_t>((count + kThreadBytes - 1) / kThreadBytes);
    isolated_parallel_for(parts, [&](std::int64_t i) {
      const std::size_t at = static_cast<std::size_t>(i) * kThreadBytes;
      copy_range(piece + at, from, row, pitch, first + at, std::min(kThreadBytes, count - at));
    });
    check(cudaMemcpyAsync(to + first, piece, count, cudaMemcpyHostToDevice, stream_), what);
    check(cudaEventRecord(taken_[piece_], stream_), what);
    piece_ ^= 1;
  }
}

}  // namespace kvq::cuda
