#pragma once

#include "diff/report.h"

#include <string>

namespace kvq {

/// One self-contained HTML page without scripts: the verdict, the rules, and what changed by layer and head. The same
/// report gives the same bytes.
std::string diff_html(const DiffReport& report);

}  // namespace kvq
