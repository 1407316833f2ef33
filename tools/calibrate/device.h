#pragma once

#include <kvq/compute/backend.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvq {

/// What --device says.
struct DeviceChoice {
  enum class Kind { automatic, cpu, cuda };
  Kind kind = Kind::automatic;
  std::vector<int> devices = {};  ///< of cuda; empty: all
};
/// @param text  auto, cpu, cuda or cuda:LIST  @throws Error{usage}
DeviceChoice parse_device(const std::string& text);

/// The backend of a run.
struct ChosenBackend {
  std::unique_ptr<Backend> owned;  ///< null for processors
  int num_devices = 0;
  Backend& get() const { return owned ? *owned : cpu_backend(); }
};
/// `automatic` takes all CUDA devices, or processors if there are none.
/// @param memory_limit  bytes of each device, or 0, see CudaLibrary::make_backend(). Where `automatic` takes
/// processors,
///                      a note on stderr says that they have no such limit.
/// @throws Error{unsupported} if CUDA is asked for and cannot be had; Error{usage} for a device that is not there
ChosenBackend choose_backend(const DeviceChoice& choice, std::int64_t memory_limit = 0);

}  // namespace kvq
