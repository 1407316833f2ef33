#pragma once

#include <cstdint>
#include <string>

namespace kvq {

/// Bytes of a text such as "4GB", "512MiB", "1.5 GB" or "80000000". kB, MB, GB, TB count in thousands, KiB, MiB, GiB,
/// TiB in 1024; capitals do not matter.
/// @param flag  named by the error
/// @throws Error{usage} for other texts, and for less than one byte
std::int64_t parse_byte_size(const std::string& text, const std::string& flag);

}  // namespace kvq
