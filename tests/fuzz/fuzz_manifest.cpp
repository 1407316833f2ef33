#include <kvq/artifact/artifact.h>
#include <kvq/core/error.h>

#include <cstring>
#include <vector>

// The input is the text of a manifest; it is wrapped into an otherwise well-formed file without tensors, so that the fuzzer's
// bytes reach the schema and everything behind it.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using kvq::Json;
  if (size > (1u << 16)) return 0;
  const std::string manifest(reinterpret_cast<const char*>(data), size);
  const Json header = {{"__metadata__", {{"format", "kvq-artifact"}, {"version", "1.0"}, {"requires", ""}, {"kvq.manifest", manifest}}}};
  const std::string text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
  const std::uint64_t length = text.size();
  std::vector<std::byte> bytes(sizeof length + text.size());
  std::memcpy(bytes.data(), &length, sizeof length);
  std::memcpy(bytes.data() + sizeof length, text.data(), text.size());
  try {
    kvq::load_artifact(kvq::SafetensorsFile::parse(bytes, "fuzz"));
  } catch (const kvq::Error& error) {
    if (error.kind() == kvq::ErrorKind::internal) throw;  // a bug is a crash
  }
  return 0;
}
