#pragma once

#include <kvq/runtime/loaded_model.h>

#include <cstdint>
#include <string>

namespace kvq {

/// Everything that two caches must agree on to read each other's pages, sink slots and ring slots, as text. What it
/// leaves out (activations, folding, query heads, the number of ranks) changes no stored byte.
std::string layout_text(const LoadedModel& model);

/// 64-bit FNV-1a of layout_text(). Programs of other versions compare it, so the text changes only with
/// formats/pages.md.
std::uint64_t layout_id(const LoadedModel& model);

}  // namespace kvq
