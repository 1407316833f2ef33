#pragma once

#include <kvq/eval/attention_error.h>

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace kvq {

/// One KV head's exact rows of all tokens.
struct ExactRows {
  std::vector<float> k, v;  ///< [T, D], [T, Dv]; v is empty for a layer without values
};
/// The same rows as one scheme stores them.
struct StoredRows {
  std::vector<float> k_change;     ///< [T, D] k^ - k, 0 for sink tokens; empty if keys are exact
  std::vector<float> v_change, v;  ///< [T, Dv] v^ - v, and v^
  ExactTokens k_exact, v_exact;
};

/// A block of queries of one query head: tokens [first, first + count) of the sequence [begin, end).
struct QueryBlock {
  std::int64_t begin = 0, first = 0, count = 0;
  int q_head = 0;
  std::int64_t end = 0;
};

/// Attention of one block, with exact and with stored rows. Threads must not share an object; calls reuse its memory.
class AttentionBlock {
 public:
  static constexpr std::int64_t kQueries = 32;

  /// @param with_context  whether compare() measures AttentionSums::context, too
  AttentionBlock(const LayerGeometry& geometry, bool with_context) : geometry_(geometry), with_context_(with_context) {}

  /// Exact logits, weights and outputs. Logits are capped if the layer has a cap. A learned sink takes its part of the
  /// weights.
  /// @param q  [count, D]
  void look(const QueryBlock& block, std::span<const float> q, const ExactRows& rows);
  /// Adds the errors of stored rows to `sums`. outputs() of look() and change() stay valid until the next call.
  /// @param curvature   [Dv, Dv] of the query head, or empty
  /// @param divergence  [count] KL of each query
  void compare(const ExactRows& rows, const StoredRows& stored, std::span<const float> curvature, AttentionSums& sums,
               std::span<float> divergence);

  std::span<const float> outputs() const { return o_; }        ///< [count, Dv]
  std::span<const float> change() const { return o_change_; }  ///< [count, Dv]

 private:
  static constexpr std::size_t kTop = 10;
  using Places = std::array<std::int64_t, kTop>;

  std::int64_t position(std::int64_t row) const { return block_.first - block_.begin + row; }
  std::int64_t visible_begin(std::int64_t row) const;  ///< in columns
  std::int64_t visible_end(std::int64_t row) const;
  /// Query `row` reads stored rows only in columns below the result.
  std::int64_t stored_end(const ExactTokens& exact, std::int64_t row) const;
  std::int64_t all_stored_end(const ExactTokens& exact) const;
  Places top_places(const float* row, std::int64_t count) const;

  /// How many keys before its own query `row` sees if AttentionSums::context counts the query, else 0.
  std::int64_t context_of(std::int64_t row) const;
  /// Adds a query to the sums of a context of `count` keys. @param change  of the logits
  void compare_context(const float* logits, const float* change, std::int64_t count, ContextSums& sums);
  /// Of the largest logits, how many stay among the largest.
  double kept_places(const float* logits, const float* change, std::int64_t count);
  float sink() const;  ///< the query head's learned sink, -infinity if there is none
  static void cap_change(const float* logits, float* delta, std::int64_t count, double cap);
  double change_row(std::int64_t row, std::int64_t from, std::int64_t to);
  void change_logits(const StoredRows& stored, AttentionSums& sums, std::span<float> divergence);
  void change_outputs(const ExactRows& rows, const StoredRows& stored);
  void weigh(const std::vector<float>& weights, std::int64_t from, std::int64_t to, const float* values,
             std::vector<float>& out) const;
  const std::vector<float>& masked(const std::vector<float>& weights, const ExactTokens& exact, std::int64_t from,
                                   std::int64_t to);

  const LayerGeometry& geometry_;
  bool with_context_;
  QueryBlock block_;
  std::span<const float> q_;
  std::int64_t key_begin_ = 0, keys_ = 0;  ///< token of column 0, and number of columns
  std::vector<float> s_, p_, d_;           ///< [count, keys] logits, weights, change of logits and then of weights
  std::vector<float> uncapped_;            ///< [count, keys] logits before the cap; unused if the layer has none
  std::vector<float> o_, o_change_, sv_, band_, shifted_, turned_, context_p_, context_d_;
  std::vector<float> sink_p_;        ///< [count] weights of the learned sink
  std::vector<float> with_sink_[3];  ///< p, logits and change of one row and its sink
  std::vector<Places> top_;
};

}  // namespace kvq
