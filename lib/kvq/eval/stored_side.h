#pragma once

#include <kvq/dump/dump_file.h>
#include <kvq/plan/layer_plan.h>

#include <cstdint>
#include <memory>
#include <span>

namespace kvq {

/// A query reads the tokens [sink, coded_end(query)) of its sequence as codes, and all other tokens exact.
struct ExactTokens {
  std::int64_t sink = 0;     ///< how many first tokens are exact
  std::int64_t recent = 0;   ///< how many last tokens are exact, the query's own included
  std::int64_t granule = 1;  ///< tokens are quantized this many at a time: up to granule - 1 more are exact
  /// @param query  index in the sequence, from 0
  std::int64_t coded_end(std::int64_t query) const;
  bool operator==(const ExactTokens&) const = default;
};

/// The interface by which measures read one side of a layer as it is stored.
class StoredSide {
 public:
  virtual ~StoredSide() = default;

  /// Quantizes and dequantizes all rows of one KV head. exact_tokens() says which tokens are exact instead.
  /// @param tensor  rows of all heads
  /// @param first   first token of a sequence in it
  /// @param rows    [n, D] the head's rows of that sequence, from its first token on, in place
  virtual void restore(const ActivationTensor& tensor, std::int64_t first, int kv_head,
                       std::span<float> rows) const = 0;
  virtual ExactTokens exact_tokens() const { return {}; }
  /// Bits of an element, everything stored included, of a sequence of `context` tokens.
  virtual double effective_bits(std::int64_t context) const = 0;
  virtual double code_bits() const = 0;
  /// The plan of the stored rows, or null.
  virtual const TensorPlan* plan() const { return nullptr; }
};

/// One layer; a missing side is exact (16 bit).
struct StoredLayer {
  std::unique_ptr<StoredSide> k, v;
};

/// Rows stored by a plan. The plan must outlive the result.
std::unique_ptr<StoredSide> stored_by_plan(const TensorPlan& plan, int dim, const Windows& windows);

}  // namespace kvq
