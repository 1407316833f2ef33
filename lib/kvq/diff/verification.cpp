#include <kvq/diff/verification.h>

#include <fmt/format.h>

#include <algorithm>
#include <span>

namespace kvq {

namespace {

/// Rows of x [rows, D] that are not zero; zero has two signs.
std::int64_t count_rows(std::span<const std::uint16_t> x, std::size_t rows) {
  constexpr std::uint16_t kMagnitude = 0x7fff;
  std::int64_t count = 0;
  const std::size_t dim = rows == 0 ? 0 : x.size() / rows;
  for (std::size_t row = 0; row < rows; ++row) {
    const auto own = x.subspan(row * dim, dim);
    count += std::any_of(own.begin(), own.end(), [](std::uint16_t bits) { return (bits & kMagnitude) != 0; }) ? 1 : 0;
  }
  return count;
}

std::int64_t rows_of(const Artifact& artifact, int layer, Side side) {
  const auto it = artifact.golden.find(layer);
  if (it == artifact.golden.end()) return 0;
  const GoldenRows& rows = it->second;
  return side == Side::k ? count_rows(rows.tokens.k, rows.k.firm.size())
                         : count_rows(rows.tokens.v, rows.v.firm.size());
}

}  // namespace

std::vector<Reading> verification_readings(const std::vector<Check>& before, const std::vector<Check>& after) {
  std::vector<Reading> readings;
  for (const auto& [file, checks] : {std::pair{"old", &before}, {"new", &after}})
    for (const Check& check : *checks)
      if (!check.passed)
        readings.push_back({"verification", fmt::format("{}: {}: {}", file, check.name, check.detail), {}, 1.0});
  if (readings.empty()) readings.push_back({"verification", "", {}, 0.0});
  return readings;
}

std::vector<Reading> lost_golden_rows(const Artifact& before, const Artifact& after) {
  std::vector<Reading> readings;
  for (const auto& [layer, rows] : before.golden)
    for (const Side side : kSides) {
      const std::int64_t had = rows_of(before, layer, side);
      if (had == 0) continue;
      const std::int64_t lost = std::max<std::int64_t>(0, had - rows_of(after, layer, side));
      readings.push_back(
          {"golden_rows.lost", fmt::format("layer {} {}", layer, name(side)), {}, static_cast<double>(lost)});
    }
  return readings;
}

}  // namespace kvq
