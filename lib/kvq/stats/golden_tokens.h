#pragma once

#include <kvq/plan/golden_rows.h>
#include <kvq/stats/held_out.h>

#include <cstdint>

namespace kvq {

/// Chooses the golden tokens: the last `wanted` tokens of the sequence with the most tokens that are not held out (the
/// first of equal ones); all tokens of the sequence that are not held out if there are fewer.
TokenRange choose_golden(const LayerActivations& layer, std::int64_t wanted, const TokenRange& held_out);

/// Rows of the golden tokens, rounded to bfloat16, with the queries of the last token. @param range  not empty
GoldenTokens take_golden(const LayerActivations& layer, const TokenRange& range);

/// The last `count` golden tokens, or all if there are fewer.
GoldenTokens last_golden(GoldenTokens tokens, const LayerGeometry& geometry, std::int64_t count);

}  // namespace kvq
