#pragma once

#include <kvq/stats/token_sample.h>

#include <cstdint>
#include <vector>

namespace kvq {

/// Tokens [first, first + count) of the dump.
struct TokenRange {
  std::int64_t first = 0, count = 0;
  bool contains(std::int64_t token) const { return token >= first && token < first + count; }
  bool operator==(const TokenRange&) const = default;
};

/// The beginning of one sequence, whole, so that attention over it is exact: what plans are compared on. Its tokens are
/// in no moment and in no sample.
struct HeldOut {
  std::int64_t token = 0;           ///< index in the dump of its first token
  std::vector<std::int64_t> query;  ///< [m] places in it whose queries are kept, ascending
  SampledRows q, k, v;              ///< [m, Hq, D], [n, Hkv, D], [n, Hkv, Dv]
  std::vector<float> curvature;     ///< [Hq, Dv, Dv] output curvature of the dump (formats/dump.md), or empty
  std::int64_t count() const;       ///< n
};

/// Which tokens to hold out: the first ones of the longest sequence (the first such), at most `wanted` and a third of
/// the dump; count 0 if that leaves fewer than 8.
TokenRange choose_held_out(const LayerActivations& layer, std::int64_t wanted);
/// Their rows, with up to 512 evenly spaced queries.
HeldOut hold_out(const LayerActivations& layer, const TokenRange& range);

}  // namespace kvq
