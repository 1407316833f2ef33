#include <kvq/dump/content_hash.h>

#include <fmt/format.h>
#include <xxhash.h>

namespace kvq {

std::string content_hash_of(std::string_view text) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(text.data(), text.size()));
  std::string hash = "xxh3-128:";
  for (const unsigned char byte : canonical.digest) hash += fmt::format("{:02x}", byte);
  return hash;
}

}  // namespace kvq
