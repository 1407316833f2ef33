#pragma once

#include <kvq/dump/dump_file.h>
#include <kvq/eval/stored_side.h>

#include <cstdint>
#include <span>
#include <vector>

namespace kvq {

/// Selects the (query, key) pairs of a layer that are measured. The paper only says "over the test tokens".
struct RopeLogitRequest {
  std::int64_t pairs = 2048;  ///< of a query head, at least 1; at most one per token is used
  std::uint64_t seed = 0;     ///< selects the key of each query
};

/// Tokens of the dump, counted over all sequences. A pair may cross sequences and the key may come after the query: the
/// offsets are set analytically, so the tokens' own positions do not matter.
struct TokenPair {
  std::int64_t query = 0, key = 0;
};

/// P = min(T, pairs) pairs. Query tokens are evenly spaced: t_i = floor(i T / P), which is every token if T <= pairs.
/// The key of pair i is token (m t_i + 13 + 104729 seed) mod T, where m is the smallest number from 7919 on that has no
/// factor in common with T, so that no key comes twice.
std::vector<TokenPair> choose_pairs(std::int64_t tokens, const RopeLogitRequest& request);

/// The 50 evenly spaced relative offsets in [-1024, 1024] of Block-GTQ, Appendix B.3: -1024 + 2048 i / 49 positions,
/// not rounded.
std::vector<double> rope_offsets();

/// Mean absolute error of the logits of one layer, before the softmax scale, in units of q times k.
struct RopeLogitMae {
  double mean = 0.0;            ///< over KV heads, all of equal weight
  std::vector<double> kv_head;  ///< [Hkv] over the query heads of the group, the pairs and the offsets
};

/// Per-layer RoPE-logit MAE (Block-GTQ, Appendix B.3), K only: mean over KV heads h, query heads g of the group, pairs
/// and offsets D of |q^T R_D (k - k_hat)|, q and k before RoPE. Schemes quantize keys after RoPE, so k - k_hat is
/// formed after RoPE. Then q and k - k_hat are rotated back by R(-p) of their own positions, which is exact because
/// R(p) is orthogonal and linear. R_D rotates the rotary pairs of the layer by D inv_freq; all other channels stay, as
/// in the paper. The rotation takes a pair of channels as one complex number, q = a and k - k_hat = b, so that an
/// offset costs Re(conj(a) b exp(i D w)) a pair. An attention factor (YaRN) stays in q and k - k_hat, hence squared in
/// the rotary part of the logit, as in the model. Every key counts as quantized: exact windows are ignored.
///
/// One object measures any number of ways to store the layer. The layer must outlive the object. Results do not depend
/// on threads.
class RopeLogitError {
 public:
  RopeLogitError(const LayerActivations& layer, const RopeLogitRequest& request);
  RopeLogitError(LayerActivations&&, const RopeLogitRequest&) = delete;

  /// Error of the layer's keys as they are stored, each sequence from its beginning. @throws Error{numerical}
  RopeLogitMae of_stored(const StoredSide& keys) const;
  /// Error of any other keys. @param error  [Hkv, P, D] k - k_hat after RoPE, in the order of keys()
  RopeLogitMae of_error(std::vector<float> error) const;

  const std::vector<TokenPair>& pairs() const { return pairs_; }
  std::span<const float> keys() const { return k_; }  ///< [Hkv, P, D] after RoPE

 private:
  std::vector<float> turned_back(std::vector<float> rows, std::int64_t TokenPair::* token) const;
  double mae_of_head(int q_head, std::span<const float> error) const;

  const LayerActivations& layer_;
  const LayerGeometry& geometry_;
  RopeStyle rotation_;                     ///< of the layer, without attention factor
  std::vector<TokenPair> pairs_;           ///< [P]
  std::vector<float> k_;                   ///< [Hkv, P, D] after RoPE
  std::vector<RopeBlock> rotary_, still_;  ///< blocks that R_D rotates, and the others
  std::vector<double> cos_, sin_;          ///< [rotary blocks, offsets]
};

}  // namespace kvq
