#pragma once

#include <kvq/container/json.h>
#include <kvq/methods/method.h>

#include <string>
#include <vector>

namespace kvq {

std::string ablation_table(const std::vector<AblationRow>& rows);
Json ablation_json(const std::vector<AblationRow>& rows);

/// Both targets, and the change from free to runtime. @param rows  of both
std::string targets_table(const std::vector<TargetRow>& rows);
/// {"runtime": {..}, "free": {..}, "change_percent": {"row_bytes", "cost", "output_error"}}
Json targets_json(const std::vector<TargetRow>& rows);

}  // namespace kvq
