#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvq {

/// The name that a mistyped word most likely means, or an empty text if no name is near. Letters of either case, and
/// '-' and '_', count as equal. A name is near if at most one letter in three (at least one) is changed, added, left
/// out or swapped with its neighbor, or if it is the only one that begins with the word (three letters or more).
std::string nearest_name(std::string_view word, std::span<const std::string> names);

/// Hint of an error about an unknown name: "did you mean oscar? choose one of oscar, quarot".
/// @param list  the names as the hint shows them; empty: `names` joined by commas
std::string hint_of_names(std::string_view word, std::span<const std::string> names, std::string_view list = {});

}  // namespace kvq
