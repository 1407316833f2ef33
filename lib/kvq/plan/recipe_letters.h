#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvq {

/// One factor of a recipe (Rotation::recipe, docs/glossary.md), as tools explain it.
struct RecipeLetter {
  std::string_view letter;   ///< "U", "Haar", "c", ...
  std::string_view meaning;  ///< "eigenbasis of the target moment"
};

/// All factors, in the order of the glossary; "c" stands for the center in front of a recipe.
std::span<const RecipeLetter> recipe_letters();

/// The factors that appear in these recipes, each once, in the order of recipe_letters(). A Hadamard's order ("H128")
/// and words such as "shared" do not count.
/// @param recipes  as tools print them: "c U*G*S*H or S*H"
std::vector<RecipeLetter> letters_in(const std::vector<std::string>& recipes);

}  // namespace kvq
