#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace kvq {

/// Runs `action` in a child process, to learn whether it would crash or hang this process. Changes to memory are lost
/// with the child; exceptions of `action` are ignored.
/// @param input_bytes  bytes that the action may read: the limits on time and memory grow with them
/// @return  how the child failed, for a message; empty if it ended normally or could not be started
std::optional<std::string> fate_in_child(const std::function<void()>& action, std::uintmax_t input_bytes);

}  // namespace kvq
