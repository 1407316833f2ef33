#include "calibrate/device.h"

#include "common/plural.h"
#include "common/say.h"

#include <kvq/compute/cuda_library.h>
#include <kvq/core/error.h>
#include <kvq/core/int_list.h>

#include <fmt/format.h>

#include <numeric>
#include <string_view>

namespace kvq {

DeviceChoice parse_device(const std::string& text) {
  using Kind = DeviceChoice::Kind;
  constexpr std::string_view kWithList = "cuda:";
  if (text == "auto") return {Kind::automatic};
  if (text == "cpu") return {Kind::cpu};
  if (text == "cuda") return {Kind::cuda};
  if (text.starts_with(kWithList) && text.size() > kWithList.size())
    return {Kind::cuda, parse_int_list(text.substr(kWithList.size()), "--device")};
  throw Error{ErrorKind::usage, fmt::format("--device: expected auto, cpu, cuda or cuda:0,1, found \"{}\"", text)};
}

ChosenBackend choose_backend(const DeviceChoice& choice, std::int64_t memory_limit) {
  using Kind = DeviceChoice::Kind;
  if (choice.kind == Kind::cpu && memory_limit > 0)
    throw Error{ErrorKind::usage, "--mem-limit is about memory of GPUs, of which --device cpu takes none",
                "leave out one of both; --dry-run predicts the memory of processors"};
  if (choice.kind == Kind::cpu) return {};
  const CudaLibrary library;
  if (library.num_devices() == 0) {
    if (choice.kind == Kind::automatic) {
      if (memory_limit > 0)
        say(fmt::format("note: --mem-limit has no effect: processors compute ({})\n", library.why_not()));
      return {};
    }
    throw Error{ErrorKind::unsupported, fmt::format("--device cuda: {}", library.why_not()),
                "--device cpu needs no GPU"};
  }
  std::vector<int> devices = choice.devices;
  if (devices.empty()) {
    devices.resize(static_cast<std::size_t>(library.num_devices()));
    std::iota(devices.begin(), devices.end(), 0);
  }
  for (const int device : devices)
    if (device < 0 || device >= library.num_devices())
      throw Error{ErrorKind::usage,
                  fmt::format("--device: device {} is not there (this machine has {}, from 0)", device,
                              counted(static_cast<std::size_t>(library.num_devices()), "device"))};
  return {library.make_backend(devices, memory_limit), static_cast<int>(devices.size())};
}

}  // namespace kvq
