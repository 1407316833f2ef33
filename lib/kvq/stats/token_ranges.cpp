#include <kvq/stats/token_ranges.h>

#include <algorithm>
#include <tuple>

namespace kvq {

namespace {

std::optional<DumpRange> common_part(const DumpRange& a, const DumpRange& b) {
  const std::int64_t first = std::max(a.first, b.first);
  const std::int64_t end = std::min(a.first + a.count, b.first + b.count);
  if (a.dump != b.dump || end <= first) return std::nullopt;
  return DumpRange{a.dump, first, end - first};
}

std::vector<DumpRange> in_order(std::vector<DumpRange> ranges) {
  std::ranges::sort(ranges, [](const DumpRange& a, const DumpRange& b) {
    return std::tie(a.dump, a.first) < std::tie(b.dump, b.first);
  });
  return ranges;
}

}  // namespace

void append_ranges(std::vector<DumpRange>& into, const std::vector<DumpRange>& other) {
  for (const DumpRange& range : other) {
    const bool continues =
        !into.empty() && into.back().dump == range.dump && into.back().first + into.back().count == range.first;
    if (continues) {
      into.back().count += range.count;
    } else {
      into.push_back(range);
    }
  }
}

std::optional<DumpRange> find_overlap(const std::vector<DumpRange>& a, const std::vector<DumpRange>& b) {
  for (const DumpRange& range : a)
    for (const DumpRange& other : b)
      if (auto common = common_part(range, other)) return common;
  return std::nullopt;
}

bool overlaps_itself(const std::vector<DumpRange>& ranges) {
  const std::vector<DumpRange> sorted = in_order(ranges);
  for (std::size_t i = 1; i < sorted.size(); ++i)
    if (common_part(sorted[i - 1], sorted[i])) return true;
  return false;
}

std::int64_t total_tokens(const std::vector<DumpRange>& ranges) {
  std::int64_t tokens = 0;
  for (const DumpRange& range : ranges) tokens += range.count;
  return tokens;
}

}  // namespace kvq
