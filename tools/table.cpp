#include "table.h"

#include <fmt/core.h>

#include <algorithm>

namespace kvq {

namespace {

std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

}  // namespace

std::string format_table(const std::vector<std::vector<std::string>>& rows, const std::string& alignment) {
  std::vector<std::size_t> widths(alignment.size(), 0);
  for (const auto& row : rows)
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], width_of(row[c]));
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string pad(widths[c] - width_of(row[c]), ' ');
      if (c > 0) line += "  ";
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

std::string format_seconds(double seconds) {
  if (seconds < 60.0) return fmt::format("{:.1f} s", seconds);
  if (seconds < 3600.0) return fmt::format("{:.0f} min {:02.0f} s", seconds / 60.0 - 0.5, seconds - 60.0 * static_cast<int>(seconds / 60.0));
  return fmt::format("{:.1f} h", seconds / 3600.0);
}

}  // namespace kvq
