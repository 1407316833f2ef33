#include "common/wrap.h"

#include "common/table.h"

#include <sstream>

namespace kvq {

std::string wrapped(const std::string& label, const std::string& text) {
  const std::string indent(width_of(label), ' ');
  std::istringstream words(text);
  std::string all, line = label;
  bool is_empty = true;  // no word behind the label or the indent
  for (std::string word; words >> word;) {
    if (!is_empty && width_of(line) + 1 + width_of(word) > kPageColumns) {
      all += line + "\n";
      line = indent;
      is_empty = true;
    }
    line += (is_empty ? "" : " ") + word;
    is_empty = false;
  }
  return all + line + "\n";
}

}  // namespace kvq
