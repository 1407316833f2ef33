#pragma once

#include <kvq/compute/cuda/kernels.h>
#include <kvq/compute/device_memory.h>
#include <kvq/core/geometry.h>

#include <algorithm>
#include <cstdint>

/// Bytes of device memory that the verbs of the CUDA backend take: they cut their work into batches by these numbers,
/// and predictions add them up.
namespace kvq::cuda {

/// What the CUDA driver and the kernels of all libraries take on each device, by estimate.
inline constexpr std::int64_t kDeviceBytes = std::int64_t{640} << 20;
/// What the handles of one context take, by estimate; most of it is the workspace of cuBLAS (32 MiB).
inline constexpr std::int64_t kContextBytes = std::int64_t{80} << 20;
/// Most contexts of a device.
inline constexpr int kMostLanes = 4;
/// Buffers for which a context has to have room, so that it is worth its handles.
inline constexpr std::int64_t kLaneBytes = std::int64_t{512} << 20;
/// Part of the free memory of a device that a run without a limit takes at the most.
inline constexpr double kFreeShare = 0.9;

/// Contexts of a device that fit into a limit.
constexpr int lanes_within(std::int64_t limit) {
  return static_cast<int>(units_at_once(limit, kDeviceBytes, kContextBytes + kLaneBytes, kMostLanes));
}
/// Bytes of a limit that are not for buffers.
constexpr std::int64_t bytes_beside(int lanes) { return kDeviceBytes + lanes * kContextBytes; }

/// Tokens of one head that are in double at a time. It does not follow the limit, because what cuBLAS computes may
/// depend on the number of products.
inline constexpr std::int64_t kTokensAtOnce = std::int64_t{kChunkTokens} * 256;

/// Tokens of a piece of a head, in double and in whole chunks.
constexpr std::int64_t padded_tokens(std::int64_t tokens) {
  return (std::min(tokens, kTokensAtOnce) + kChunkTokens - 1) / kChunkTokens * kChunkTokens;
}
/// Second moment of rows that are on the device: a head's rows in double, the products of their chunks, the sums.
constexpr std::int64_t moment_bytes(std::int64_t tokens, std::int64_t dim, bool weighted) {
  const std::int64_t padded = padded_tokens(tokens), chunks = padded / kChunkTokens;
  return 8 * (padded * dim * (weighted ? 2 : 1) + (chunks + 1) * (dim * dim + dim));
}
/// Quadratic forms of rows that are on the device, without the matrices.
constexpr std::int64_t form_bytes(std::int64_t tokens, std::int64_t dim) {
  return 2 * 8 * padded_tokens(tokens) * dim + 4 * std::min(tokens, kTokensAtOnce);
}

/// A sequence as Backend::add_attention_moments() has it on the device.
struct AttentionShape {
  std::int64_t tokens = 0;
  int group = 1, k_dim = 0, v_dim = 0;
  std::int64_t number_bytes = 2;  ///< of the largest type of q, k and v
  std::int64_t parts_bytes = 2;   ///< of a number as a sum of bfloat16 parts: 2 for bfloat16, else 6
  bool scored = false;
};
/// Attention of one KV head: rows, parts, outputs, softmax, column energies, scores.
constexpr std::int64_t attention_head_bytes(const AttentionShape& a) {
  const std::int64_t dim = padded_dim(a.k_dim, a.v_dim), group = a.group;
  const std::int64_t rows = a.number_bytes * (group * a.k_dim + a.k_dim + a.v_dim),
                     parts = a.parts_bytes * (group + 2) * dim, results = group * (4 * dim + 8) + 8,
                     scores = a.scored ? 4 * (group + 1) : 0;
  return a.tokens * (rows + parts + results + scores) + 4 * group;
}
/// What all KV heads of a batch share: which tokens count, and the moments of one head.
constexpr std::int64_t attention_shared_bytes(const AttentionShape& a) {
  return a.tokens + moment_bytes(a.tokens, std::max(a.k_dim, a.v_dim), a.scored);
}
/// KV heads that are of use in one batch: together they fill a device.
constexpr std::int64_t attention_heads_wanted(const AttentionShape& a, std::int64_t kv_heads) {
  const std::int64_t of_head = a.tokens * padded_dim(a.k_dim, a.v_dim) * (a.group * (4 + 6) + 2 * 6);
  return units_at_once(std::int64_t{2} << 30, 0, of_head, kv_heads);
}
constexpr Need attention_need(const AttentionShape& a, std::int64_t kv_heads) {
  const std::int64_t shared = attention_shared_bytes(a), each = attention_head_bytes(a);
  return {shared + each, shared + attention_heads_wanted(a, kv_heads) * each, "attention moments"};
}

/// Heads of a tensor whose sums are made one group after another: rows, weights, and the sums of one group.
struct MomentShape {
  std::int64_t tokens = 0;
  int dim = 0, heads_per_group = 1;
  std::int64_t number_bytes = 2;
  bool weighted = false;  ///< weights of each head

  constexpr std::int64_t head_bytes(std::int64_t of_tokens) const {
    return of_tokens * (number_bytes * dim + (weighted ? 4 : 0));
  }
};
/// The smallest batch is a piece of one head.
constexpr Need moment_need(const MomentShape& m, std::int64_t groups) {
  const std::int64_t sums = moment_bytes(m.tokens, m.dim, m.weighted);
  return {sums + m.head_bytes(std::min(m.tokens, kTokensAtOnce)),
          sums + groups * m.heads_per_group * m.head_bytes(m.tokens), "second moments"};
}

}  // namespace kvq::cuda
