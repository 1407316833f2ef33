// libFuzzer: JSON text. If the text parses, its canonical text parses to the same value.

#include <kvq/container/json.h>
#include <kvq/core/error.h>

#include <cstdlib>

using namespace kvq;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Json value;
  try {
    value = parse_json({reinterpret_cast<const char*>(data), size}, "fuzz");
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::bad_input) std::abort();
    return 0;
  }
  const std::string text = canonical_json(value);
  if (canonical_json(parse_json(text, "canonical")) != text) std::abort();
  return 0;
}
