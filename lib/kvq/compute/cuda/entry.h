#pragma once

#include <kvq/compute/backend.h>

#include <cstdint>

/// What libkvq-cuda exports and cuda_library.cpp finds by name. Both are of one build, which kvq_cuda_build() tells.
namespace kvq::cuda {

inline constexpr const char* kBuild = "kvq " KVQ_VERSION ", backend 2";

using BuildOf = const char*();
/// Number of devices; 0 with the reason in `reason` if there are none, or no driver.
using CountDevices = int(const char** reason);
/// A backend on these devices. @param host  carries out verbs that the devices do not; outlives the backend
/// @param memory_limit  bytes of each device that it may take; 0: a share of what is free now
using MakeBackend = Backend*(const int* devices, int count, Backend* host, std::int64_t memory_limit);

}  // namespace kvq::cuda
