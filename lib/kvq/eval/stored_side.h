#pragma once

#include <kvq/dump/dump_file.h>
#include <kvq/plan/layer_plan.h>

#include <cstdint>
#include <memory>
#include <span>

namespace kvq {

/// Which tokens of a sequence a query reads as codes: [sink, coded_end(query)). The others are exact.
struct ExactTokens {
  std::int64_t sink = 0;     ///< the first ones
  std::int64_t recent = 0;   ///< the last ones, the query's own included
  std::int64_t granule = 1;  ///< tokens are coded this many at a time: up to granule - 1 more are exact
  /// @param query  place in the sequence, from 0
  std::int64_t coded_end(std::int64_t query) const;
  bool operator==(const ExactTokens&) const = default;
};

/// How the keys, or the values, of one layer are kept, as far as a measure has to know.
class StoredSide {
 public:
  virtual ~StoredSide() = default;

  /// Rows of one KV head as their codes give them back. Every token counts as coded; which are exact says
  /// exact_tokens().
  /// @param tensor  what all heads hold
  /// @param first   first token of a sequence in it
  /// @param rows    [n, D] the head's rows of that sequence, from its first token on, in place
  virtual void restore(const ActivationTensor& tensor, std::int64_t first, int kv_head,
                       std::span<float> rows) const = 0;
  virtual ExactTokens exact_tokens() const { return {}; }
  /// Bits of an element, everything stored included, of a sequence of `context` tokens.
  virtual double effective_bits(std::int64_t context) const = 0;
  virtual double code_bits() const = 0;
  /// The plan behind it, or null.
  virtual const TensorPlan* plan() const { return nullptr; }
};

/// One layer; a missing side is exact (16 bit).
struct StoredLayer {
  std::unique_ptr<StoredSide> k, v;
};

/// Rows stored by a plan, which has to outlive the result.
std::unique_ptr<StoredSide> stored_by_plan(const TensorPlan& plan, int dim, const Windows& windows);

}  // namespace kvq
