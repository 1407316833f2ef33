#include <kvq/plan/recipe_letters.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <set>

namespace kvq {

namespace {

constexpr std::array kLetters = {
    RecipeLetter{"c", "centered"},
    RecipeLetter{"U", "eigenbasis of the target moment"},
    RecipeLetter{"Uc", "eigenbasis of the target moment (importance)"},
    RecipeLetter{"Ue", "eigenbasis of the coder's error"},
    RecipeLetter{"T", "transposed"},
    RecipeLetter{"J", "order reversed"},
    RecipeLetter{"H", "Hadamard"},
    RecipeLetter{"P", "bit reversal"},
    RecipeLetter{"S", "random signs"},
    RecipeLetter{"G", "channels sorted by width"},
    RecipeLetter{"B", "basis of a balanced transform"},
    RecipeLetter{"D", "channel scales of a diagonal transform"},
    RecipeLetter{"Haar", "random rotation"},
    RecipeLetter{"I", "no rotation"},
};

bool is_letter(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0; }

/// Runs of letters: "U*H128" has "U" and "H".
std::set<std::string> words_of(const std::string& recipe) {
  std::set<std::string> words;
  for (auto at = recipe.begin(); at != recipe.end();) {
    at = std::find_if(at, recipe.end(), is_letter);
    const auto end = std::find_if_not(at, recipe.end(), is_letter);
    if (at != end) words.emplace(at, end);
    at = end;
  }
  return words;
}

}  // namespace

std::span<const RecipeLetter> recipe_letters() { return kLetters; }

std::vector<RecipeLetter> letters_in(const std::vector<std::string>& recipes) {
  std::set<std::string> words;
  for (const std::string& recipe : recipes) words.merge(words_of(recipe));
  std::vector<RecipeLetter> found;
  for (const RecipeLetter& letter : kLetters)
    if (words.count(std::string(letter.letter)) > 0) found.push_back(letter);
  return found;
}

}  // namespace kvq
