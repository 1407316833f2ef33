#include <kvq/core/suggestion.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstddef>

namespace kvq {

namespace {

constexpr std::size_t kLongestWord = 64;   // longer words are no names, and the distance takes time
constexpr std::size_t kShortestStart = 3;  // letters that a beginning needs

std::string folded(std::string_view word) {
  std::string text(word);
  for (char& c : text) c = c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

/// Letters changed, added, left out or swapped with their neighbor (optimal string alignment).
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

/// The only name that begins with `word`, or empty.
std::string completed(std::string_view word, std::span<const std::string> names) {
  std::string found;
  if (word.size() < kShortestStart) return found;
  for (const std::string& name : names) {
    if (!folded(name).starts_with(word)) continue;
    if (!found.empty()) return {};
    found = name;
  }
  return found;
}

}  // namespace

std::string nearest_name(std::string_view word, std::span<const std::string> names) {
  if (word.empty() || word.size() > kLongestWord) return {};
  const std::string typed = folded(word);
  std::size_t least = std::max<std::size_t>(1, typed.size() / 3) + 1;
  std::string nearest;
  for (const std::string& name : names) {
    const std::size_t distance = edit_distance(typed, folded(name));
    if (distance >= least || distance >= typed.size()) continue;
    least = distance;
    nearest = name;
  }
  return nearest.empty() ? completed(typed, names) : nearest;
}

std::string hint_of_names(std::string_view word, std::span<const std::string> names, std::string_view list) {
  const std::string nearest = nearest_name(word, names);
  return fmt::format("{}choose one of {}", nearest.empty() ? "" : fmt::format("did you mean {}? ", nearest),
                     list.empty() ? fmt::format("{}", fmt::join(names, ", ")) : std::string(list));
}

}  // namespace kvq
