#pragma once

#include <kvq/stats/layer_stats.h>

#include <cstdint>
#include <string>

namespace kvq {

/// What a statistics file says of all layers that check_stats() needs.
struct StatsPromise {
  std::int64_t sample_tokens = 0;
  bool all_queries = true;  ///< whether moments over queries count all tokens that those over keys count
};

/// Holds the statistics of one layer against themselves: weights are the numbers of tokens (of queries) that are in the
/// sums, and the same in all moments; moments are symmetric, their diagonal is not negative, and moment and mean leave
/// a covariance that is positive semidefinite (to 1e-5 of the largest second moment, since attention runs in float32);
/// metric and curvature are second moments; sampled, held-out and golden tokens are tokens of the layer; ranges have as
/// many tokens as the layer and none twice.
/// @param file  name, for errors
/// @throws Error{bad_input} naming file, layer and tensor, with what was expected and found
void check_stats(const LayerStats& stats, const StatsPromise& promise, const std::string& file);

}  // namespace kvq
