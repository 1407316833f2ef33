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

std::string range_hash_of(const std::string& layer_hash, std::int64_t first, std::int64_t count) {
  return content_hash_of(fmt::format("{} {} {}", layer_hash, first, count));
}

std::string joint_hash_of(const std::vector<std::string>& layer_hashes) {
  std::string all;
  for (const std::string& hash : layer_hashes) all += hash + "\n";
  return content_hash_of(all);
}

}  // namespace kvq
