#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace kvq {

/// Runs `action` in a child process first, to learn whether it would crash or hang this one. What the child does to
/// memory is lost; what it throws is ignored.
/// @param input_bytes  what the action may have to read, for a fair limit on its time
/// @return  what befell the child, for a message, or nothing if it came through (or there could be no child)
std::optional<std::string> fate_in_child(const std::function<void()>& action, std::uintmax_t input_bytes);

}  // namespace kvq
