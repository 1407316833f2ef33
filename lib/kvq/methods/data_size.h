#pragma once

#include <kvq/core/geometry.h>

#include <cstdint>
#include <string>

namespace kvq {

/// Tokens for each channel of a head below which a calibration is warned of (docs/methods.md, "How much data").
inline constexpr int kEnoughTokensPerChannel = 4;
/// Tokens below which a calibration is refused.
inline constexpr int kLeastTokens = 16;

/// kEnoughTokensPerChannel times the largest head_dim of the model's layers.
std::int64_t enough_tokens(const ModelGeometry& model);

/// A sentence that says how many tokens there are and how many are enough; empty if there are enough.
std::string too_few_tokens(const ModelGeometry& model, std::int64_t tokens);

/// @throws Error{usage} for fewer than kLeastTokens tokens
void check_tokens(std::int64_t tokens);

}  // namespace kvq
