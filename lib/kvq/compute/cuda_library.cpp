#include <kvq/compute/cuda/entry.h>
#include <kvq/compute/cuda_library.h>
#include <kvq/core/error.h>

#include <dlfcn.h>

#include <filesystem>
#include <string_view>
#include <vector>

namespace kvq {

namespace {

namespace fs = std::filesystem;
constexpr const char* kName = "libkvq-cuda.so";

template <typename Function>
Function* find(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

/// Where the library may be: beside the program, and where `cmake --install` puts libraries.
std::vector<fs::path> places() {
  std::error_code unreadable;
  const fs::path folder = fs::read_symlink("/proc/self/exe", unreadable).parent_path();
  return {folder / kName, folder / ".." / KVQ_LIBRARY_FOLDER / kName};
}

}  // namespace

CudaLibrary::CudaLibrary() {
  for (const fs::path& place : places()) {
    std::error_code unreadable;
    if (!fs::exists(place, unreadable)) continue;
    library_ = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library_) {
      why_not_ = dlerror();
      return;
    }
    const auto build = find<cuda::BuildOf>(library_, "kvq_cuda_build");
    if (!build || std::string_view(build()) != cuda::kBuild) {
      why_not_ =
          fmt::format("{} is of {}, expected {}", place.string(), build ? build() : "another program", cuda::kBuild);
      return;
    }
    const auto count = find<cuda::CountDevices>(library_, "kvq_cuda_devices");
    const char* reason = "";
    num_devices_ = count ? count(&reason) : 0;
    if (num_devices_ == 0) why_not_ = reason;
    return;
  }
  why_not_ = fmt::format("this build has no {}", kName);
}

std::unique_ptr<Backend> CudaLibrary::make_backend(std::span<const int> devices, std::int64_t memory_limit,
                                                   Backend& host) const {
  KVQ_ASSERT(num_devices_ > 0 && !devices.empty());
  const auto make = find<cuda::MakeBackend>(library_, "kvq_cuda_backend");
  KVQ_ASSERT(make != nullptr);
  return std::unique_ptr<Backend>(make(devices.data(), static_cast<int>(devices.size()), &host, memory_limit));
}

}  // namespace kvq
