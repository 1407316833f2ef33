#pragma once

#include <kvq/core/geometry.h>

#include <cstdint>
#include <string>

namespace kvq {

/// Tokens for each channel of a head below which a calibration is warned of (docs/methods.md, "How much data").
inline constexpr int kEnoughTokensPerChannel = 4;
/// The same for a budget over layers and sides, which compares many plans on a third of a short dump.
inline constexpr int kEnoughTokensOfBudget = 16;
/// Tokens below which a calibration is refused.
inline constexpr int kLeastTokens = 16;

/// A sentence that says how many tokens there are and how many are enough, for the largest head_dim of the model's
/// layers; empty if there are enough.
/// @param has_budget  a budget over layers and sides was spent
std::string too_few_tokens(const ModelGeometry& model, std::int64_t tokens, bool has_budget);

/// @throws Error{usage} for fewer than kLeastTokens tokens
void check_tokens(std::int64_t tokens);

}  // namespace kvq
