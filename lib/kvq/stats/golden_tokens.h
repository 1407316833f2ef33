#pragma once

#include <kvq/plan/golden_rows.h>
#include <kvq/stats/held_out.h>

#include <cstdint>

namespace kvq {

/// Which tokens to keep as golden ones: the last `wanted` of the sequence with the most tokens that are not held out
/// (the first such); fewer if it has fewer.
TokenRange choose_golden(const LayerActivations& layer, std::int64_t wanted, const TokenRange& held_out);

/// Their rows, rounded to bfloat16, with the queries of the last one. @param range  not empty
GoldenTokens take_golden(const LayerActivations& layer, const TokenRange& range);

/// The last `count` of them, or all if there are no more.
GoldenTokens last_golden(GoldenTokens tokens, const LayerGeometry& geometry, std::int64_t count);

}  // namespace kvq
