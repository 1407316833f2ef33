#pragma once

#include <kvq/container/json.h>
#include <kvq/methods/method.h>

#include <string>
#include <vector>

namespace kvq {

/// A table of the ingredients, if there are any, and one of both targets, with the change from free to runtime.
std::string ablation_text(const Ablation& ablation);
Json ingredients_json(const std::vector<AblationRow>& rows);
/// {"runtime": {..}, "free": {..}, "change_percent": {"row_bytes", "cost", "output_error"}}. @param rows  of both
Json targets_json(const std::vector<TargetRow>& rows);

}  // namespace kvq
