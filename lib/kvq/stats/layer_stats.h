#pragma once

#include <kvq/compute/moment.h>
#include <kvq/core/geometry.h>
#include <kvq/plan/golden_rows.h>
#include <kvq/stats/held_out.h>
#include <kvq/stats/token_sample.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace kvq {

/// The moments that can be collected (formats/stats.md).
enum class Moment { query, key, value, scored_value, scored_query, sst };
inline constexpr Moment kAllMoments[] = {Moment::query,        Moment::key,          Moment::value,
                                         Moment::scored_value, Moment::scored_query, Moment::sst};

const char* to_string(Moment moment);
std::optional<Moment> moment_from_string(std::string_view name);
Side side_of(Moment moment);  ///< the side whose channels the moment's matrix has

/// The tokens whose queries count in moments over queries (query, scored_value, scored_query, the C_Q of sst) and in
/// the weights of sampled values. Keys and values of all tokens count.
enum class Queries {
  all,
  generated,  ///< of tokens that the model produced (decode-time queries, SAW-INT4 A.3)
  prompt,     ///< of the other tokens
};
inline constexpr Queries kAllQueries[] = {Queries::all, Queries::generated, Queries::prompt};

const char* to_string(Queries queries);
std::optional<Queries> queries_from_string(std::string_view name);

/// What to collect.
struct StatsRequest {
  std::set<Moment> moments;
  Queries queries = Queries::all;
  std::int64_t sample_tokens = 2048;
  std::uint64_t seed = 0;
  std::int64_t held_out_tokens = 0;  ///< 0 = none
  std::int64_t golden_tokens = 0;    ///< 0 = none
};

/// Everything that a decision needs about one layer: sums and a sample, a few MB. A monoid under merge().
struct LayerStats {
  int layer = 0;
  LayerGeometry geometry;
  bool has_values = true;
  std::int64_t tokens = 0;
  std::int64_t sequences = 0;
  std::map<Moment, std::vector<MomentSum>> moments;  ///< one sum per KV head
  TokenSample sample;
  std::vector<double>
      o_proj_metric;  ///< [Hkv, Dv, Dv] sum of W_h^T W_h over the group's query heads, W_h o_proj's columns; or empty
  std::optional<HeldOut> held_out;
  std::optional<GoldenTokens> golden;  ///< real rows for the artifact; the sums contain their tokens
  std::string content_hash;            ///< of the dump data of this layer
  std::vector<DumpRange> ranges;       ///< whose tokens these are, in order; empty if a file before 1.5 does not say

  /// @throws Error{usage} naming layer and moment if it was not collected
  const std::vector<MomentSum>& moment(Moment which) const;
};

/// Adds statistics of other sequences of the same layer. Up to rounding, the result equals the statistics of one run
/// over all sequences.
/// @throws Error{bad_input} if layer, geometry or moments differ or a token is in both, Error{unsupported} for `sst`
void merge(LayerStats& into, const LayerStats& other, std::int64_t sample_tokens);

/// Mean of a moment, [D, D] per KV head: sum / weight. With `center` ([Hkv, D] per head, or empty) the moment of x -
/// center.
std::vector<double> mean_moment(const MomentSum& sum, const std::vector<double>& center = {});

/// Channel means of keys or values of one head.
std::vector<double> mean_vector(const MomentSum& sum);

}  // namespace kvq
