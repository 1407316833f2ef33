#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvq {

/// "xxh3-128:<32 hex digits>" of a text.
std::string content_hash_of(std::string_view text);

/// Hash of tokens [first, first + count) of a layer's dump data. @param layer_hash  of all tokens
std::string range_hash_of(const std::string& layer_hash, std::int64_t first, std::int64_t count);

/// Hash of the dump data of several layers, in layer order: `calibration.dump.hash` of an artifact.
std::string joint_hash_of(const std::vector<std::string>& layer_hashes);

}  // namespace kvq
