#pragma once

#include <kvq/core/dtype.h>
#include <kvq/core/geometry.h>
#include <kvq/dump/dump_file.h>

#include <cstdint>
#include <span>
#include <vector>

namespace kvq {

/// Rows of n sampled tokens of one tensor, [n, H, D], in the dump's type.
struct SampledRows {
  DType dtype = DType::f32;
  int heads = 0, dim = 0;
  std::vector<std::byte> raw;
  /// All rows of one head, widened: [n, D].
  std::vector<float> head(int h) const;
};

/// The n tokens of a layer with the smallest sampling keys (formats/stats.md): a mergeable, seeded sample.
struct TokenSample {
  std::vector<std::int64_t> key;    ///< [n] ascending
  std::vector<std::int64_t> token;  ///< [n] index in the dump
  SampledRows q, k, v;              ///< v.heads == 0 for a layer without values
  std::vector<float> value_weight;  ///< [n, Hkv] or empty
  std::int64_t size() const { return static_cast<std::int64_t>(key.size()); }
  /// Column of value_weight for one head, or ones.
  std::vector<float> weights(int kv_head, int num_kv_heads) const;
};

/// Rows of the given tokens of a tensor, in the stored type.
SampledRows gather_rows(const ActivationTensor& tensor, const std::vector<std::int64_t>& tokens);

/// Chooses at most `count` tokens of a loaded layer, none in [skip_first, skip_end). The caller fills in the value
/// weights.
TokenSample sample_tokens(const LayerActivations& layer, std::uint64_t seed, std::int64_t count,
                          std::int64_t skip_first = 0, std::int64_t skip_end = 0);

/// The `count` tokens with the smallest keys of both samples. `token_offset` is added to b's token indices.
TokenSample merge_samples(const TokenSample& a, const TokenSample& b, std::int64_t token_offset, std::int64_t count);

}  // namespace kvq
