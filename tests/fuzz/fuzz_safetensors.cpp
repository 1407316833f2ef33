// libFuzzer: bytes of a safetensors file. Opening either works or ends in a clean Error; after success, every byte is
// readable.
// Seeds: formats/malformed/*.safetensors.

#include <kvq/container/safetensors.h>
#include <kvq/core/error.h>

#include <cstdlib>

using namespace kvq;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto file = SafetensorsFile::parse(std::as_bytes(std::span(data, size)), "fuzz");
    content_hash(file, "");
    for (const auto& [name, info] : file.tensors())
      if (info.dtype == DType::f32) file.read<float>(name, info.shape);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::bad_input && error.kind() != ErrorKind::unsupported) std::abort();
  }
  return 0;
}
