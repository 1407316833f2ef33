#include "common/csv.h"

#include <kvq/core/error.h>

#include <fmt/core.h>

#include <cmath>

namespace kvq {

namespace {

void add_field(const std::string& field, std::string& text) {
  if (field.find_first_of(",\"\r\n") == std::string::npos) {
    text += field;
    return;
  }
  text += '"';
  for (const char c : field) text.append(c == '"' ? 2 : 1, c);
  text += '"';
}

}  // namespace

std::string format_csv(const std::vector<std::vector<std::string>>& rows) {
  std::string text;
  for (const std::vector<std::string>& row : rows) {
    KVQ_ASSERT(row.size() == rows.front().size());
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (i > 0) text += ',';
      add_field(row[i], text);
    }
    text += "\r\n";
  }
  return text;
}

std::string csv_number(double value) { return std::isnan(value) ? "" : fmt::format("{}", value); }

}  // namespace kvq
