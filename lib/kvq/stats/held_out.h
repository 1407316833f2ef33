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

/// Held-out tokens, on which plans are compared: the first tokens of one sequence, without a gap, so that attention
/// over them is exact. No moment and no sample contains these tokens.
struct HeldOut {
  std::int64_t token = 0;           ///< index of the first held-out token in the dump
  std::vector<std::int64_t> query;  ///< [m] indices among the held-out tokens whose queries are kept, ascending
  SampledRows q, k, v;              ///< [m, Hq, D], [n, Hkv, D], [n, Hkv, Dv]
  std::vector<float> curvature;     ///< [Hq, Dv, Dv] output curvature of the dump (formats/dump.md), or empty
  std::int64_t count() const;       ///< n
};

/// Chooses the held-out tokens: the first tokens of the longest sequence (the first of equal ones), at most `wanted`
/// and at most a third of the dump; count 0 if fewer than 8 would be held out.
TokenRange choose_held_out(const LayerActivations& layer, std::int64_t wanted);
/// Rows of the held-out tokens, with up to 512 evenly spaced queries.
HeldOut hold_out(const LayerActivations& layer, const TokenRange& range);

}  // namespace kvq
