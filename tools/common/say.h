#pragma once

#include <string_view>

namespace kvq {

/// Writes progress, notes and errors to `stderr`, which filters them (safe_output.h). A standard error that is closed,
/// full or without a reader takes nothing, and that is no failure of the tool: fmt::print() would throw.
void say(std::string_view text) noexcept;

}  // namespace kvq
