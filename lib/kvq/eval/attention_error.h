#pragma once

#include <kvq/dump/dump_file.h>
#include <kvq/eval/stored_side.h>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace kvq {

/// Weights as in Block-GTQ B.4, only if they are asked for: queries of the second half of their sequence, softmax over
/// the keys before the query's own. A query that sees no other key does not count.
struct ContextSums {
  double queries = 0.0, divergence = 0.0;    ///< how many, and sum KL(p || p^) in nats
  double top_hits = 0.0, top_queries = 0.0;  ///< as those of AttentionSums
  ContextSums& operator+=(const ContextSums& other);
};

/// Sums over queries (i, of all query heads of a KV head) and the keys j that they see, exact beside stored. With
/// logits l = scale q k, weights p = softmax(l), outputs o = sum_j p_j v_j, and a hat on what comes from stored rows:
struct AttentionSums {
  double queries = 0.0;
  double logit_error = 0.0, logit_energy = 0.0;    ///< sum (l^ - l)^2, sum l^2
  double sv_error = 0.0;                           ///< sum |sum_j p_j (v^_j - v_j)|^2: exact weights, stored values
  double output_error = 0.0, output_energy = 0.0;  ///< sum |o^ - o|^2, sum |o|^2
  double curved_error = 0.0;  ///< sum 1/2 (o^ - o)^T G (o^ - o), nats; G the dump's output curvature
  double divergence = 0.0;    ///< sum KL(p || p^), nats
  /// Of the 10 largest p, how many are among the 10 largest p^ (by l + (l^ - l); the first of equal ones), and how many
  /// queries were counted: those of more than 10 keys.
  double top_hits = 0.0, top_queries = 0.0;
  ContextSums context;
  AttentionSums& operator+=(const AttentionSums& other);
};

/// Contexts [edge[b], edge[b+1]) of queries, in tokens before them in their sequence: 0, 64, 256, 1024, ... The last
/// bucket is open.
std::span<const std::int64_t> context_edges();

/// One KV head under one scheme.
struct HeadError {
  /// sum |k^ - k|^2, sum |k|^2 over tokens, as the last query of each sequence reads them.
  double k_error = 0.0, k_energy = 0.0, v_error = 0.0, v_energy = 0.0;
  std::vector<AttentionSums> buckets;  ///< [context_edges().size()]
  std::vector<float> divergence;       ///< [queries per KV head, T] KL of each query
  AttentionSums total() const;
};

/// One layer under one scheme.
struct LayerError {
  std::vector<HeadError> heads;                          ///< [Hkv]
  double projected_error = 0.0, projected_energy = 0.0;  ///< |W_o (o^ - o)|^2, |W_o o|^2 if the dump has o_proj
};

/// Errors of a layer's attention when schemes store its rows: causal, sequence by sequence, with the dump's sliding
/// window and softmax scale. A query reads stored rows only where ExactTokens says so. Differences are computed
/// directly, never by subtracting two large results, so that small errors keep their digits: products in float, sums in
/// double. Memory is a few blocks of 32 queries and one KV head's rows of each scheme. If the dump has o_proj, queries
/// are measured in passes of at least 512 tokens, all heads of a pass before the next pass: W_o o of one pass takes at
/// most an eighth of the layer's bytes, or 512 tokens of each scheme. Sequences longer than a pass are quantized again
/// for each of their passes. A layer without values (mla_rope) gets logits and weights; its outputs stay 0. Results do
/// not depend on threads.
/// @param schemes       all measured in one pass over the exact attention
/// @param with_windows  false: every token counts as quantized, without regard to the schemes' ExactTokens
/// @param done          called with the finished part of the work, 0..1, from one thread
/// @param with_context  whether to measure AttentionSums::context, too
/// @throws Error{numerical} for rows that are not finite when they are coded
std::vector<LayerError> attention_errors(const LayerActivations& layer, std::span<const StoredLayer> schemes,
                                         bool with_windows, const std::function<void(double)>& done = {},
                                         bool with_context = false);

}  // namespace kvq
