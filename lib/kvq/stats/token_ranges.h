#pragma once

#include <kvq/dump/dump_file.h>

#include <optional>
#include <vector>

/// Which tokens of which dump statistics hold, so that no token is counted twice (formats/stats.md).
namespace kvq {

/// Appends ranges in order; a range that continues the last one extends it.
void append_ranges(std::vector<DumpRange>& into, const std::vector<DumpRange>& other);

/// Tokens that both lists hold: the first such range, or none.
std::optional<DumpRange> find_overlap(const std::vector<DumpRange>& a, const std::vector<DumpRange>& b);

/// Whether a list holds a token twice.
bool overlaps_itself(const std::vector<DumpRange>& ranges);

std::int64_t total_tokens(const std::vector<DumpRange>& ranges);

}  // namespace kvq
