#pragma once

#include <kvq/compute/backend.h>

#include <memory>
#include <span>
#include <string>

namespace kvq {

/// The backend for CUDA devices is a library of its own, libkvq-cuda.so, which is looked for beside the program and
/// among the installed libraries when a device is asked for. So one program serves machines with and without CUDA.
class CudaLibrary {
 public:
  /// Loads the library, which stays loaded. Without it, or without a driver or a device, num_devices() is 0.
  CudaLibrary();

  int num_devices() const { return num_devices_; }
  /// One line, if there are no devices.
  const std::string& why_not() const { return why_not_; }
  /// @param devices       numbers below num_devices(), at least one
  /// @param memory_limit  bytes of each device that the backend may take; 0: nine tenths of what is free now. No result
  ///                      depends on it. Verbs throw Error{unsupported} if it has no room for their smallest batch.
  /// @throws Error{io} if a device cannot be used
  std::unique_ptr<Backend> make_backend(std::span<const int> devices, std::int64_t memory_limit = 0,
                                        Backend& host = cpu_backend()) const;

 private:
  void* library_ = nullptr;
  int num_devices_ = 0;
  std::string why_not_;
};

}  // namespace kvq
