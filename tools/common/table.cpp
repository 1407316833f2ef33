#include "common/table.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvq {

namespace {

constexpr std::size_t kTableGap = 2;  // spaces between columns

/// Width of each column: that of its widest cell.
std::vector<std::size_t> column_widths(const std::vector<std::vector<std::string>>& rows, std::size_t columns) {
  std::vector<std::size_t> widths(columns, 0);
  for (const auto& row : rows)
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], width_of(row[c]));
  return widths;
}

}  // namespace

std::size_t width_of(const std::string& text) {
  std::size_t width = 0;
  bool in_escape = false;
  for (const char c : text) {
    if (c == '\x1b') in_escape = true;
    if (!in_escape && (c & 0xc0) != 0x80) ++width;
    if (c == 'm') in_escape = false;
  }
  return width;
}

std::size_t table_width(const std::vector<std::vector<std::string>>& rows) {
  const std::vector<std::size_t> widths = column_widths(rows, rows.front().size());
  return std::accumulate(widths.begin(), widths.end(), kTableGap * (widths.size() - 1));
}

std::string format_table(const std::vector<std::vector<std::string>>& rows, const std::string& alignment) {
  const std::vector<std::size_t> widths = column_widths(rows, alignment.size());
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string pad(widths[c] - width_of(row[c]), ' ');
      if (c > 0) line.append(kTableGap, ' ');
      line += alignment[c] == 'l' ? row[c] + pad : pad + row[c];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string format_bytes(double bytes) {
  if (bytes < 1e3) return fmt::format("{:.0f} bytes", bytes);
  if (bytes < 1e6) return fmt::format("{:.1f} kB", bytes / 1e3);
  if (bytes < 1e9) return fmt::format("{:.1f} MB", bytes / 1e6);
  return fmt::format("{:.2f} GB", bytes / 1e9);
}

std::string format_excess(double ratio, int digits) {
  const double unit = std::pow(10.0, digits);
  return fmt::format("{:+.{}f}%", std::round(100.0 * ratio * unit) / unit + 0.0,
                     digits);  // adding 0.0 turns -0 into +0
}

std::string format_seconds(double seconds) {
  if (seconds < 60.0) return fmt::format("{:.1f} s", seconds);
  if (seconds < 3600.0)
    return fmt::format("{:.0f} min {:02.0f} s", seconds / 60.0 - 0.5,
                       seconds - 60.0 * static_cast<int>(seconds / 60.0));
  return fmt::format("{:.1f} h", seconds / 3600.0);
}

}  // namespace kvq
