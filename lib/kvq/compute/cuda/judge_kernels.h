#pragma once

#include <cstdint>

struct CUstream_st;

/// Kernels that compare attention outputs under quantized keys or values with exact ones. Pointers are of the device.
namespace kvq::cuda {

/// to[h, t] = rows[h, t] M_h + offset_h, summed in double. M may be null, for the identity.
struct MatrixProduct {
  const float* rows = nullptr;     ///< [heads, count, dim]
  const double* matrix = nullptr;  ///< [heads, dim, dim]
  const float* before = nullptr;   ///< [heads, dim] subtracted from rows before the product, or null
  const float* after = nullptr;    ///< [heads, dim] added to products, or null
  float* to = nullptr;             ///< [heads, count, dim]
  int heads = 0, count = 0, dim = 0;
};
void multiply_rows(const MatrixProduct& product, CUstream_st* stream);

/// Queries of some KV heads over the first n tokens of a sequence, as AttentionCase has them.
struct JudgedHeads {
  int heads = 0, group = 1;  ///< KV heads; query heads of each
  int queries = 0, keys = 0, dim = 0, v_dim = 0;
  float scale = 1.0f, cap = 0.0f;
  int window = 0, sink_tokens = 0, recent_tokens = 0;
  const std::int64_t* position = nullptr;  ///< [queries]
  const float* sinks = nullptr;            ///< [heads * group] or null
  const float* q = nullptr;                ///< [heads * group, queries, dim]
  const float* k = nullptr;                ///< [heads, keys, dim]
  const float* v = nullptr;                ///< [heads, keys, v_dim]
  const float* curvature = nullptr;        ///< [heads * group, v_dim, v_dim] or null for the identity
  const double* metric = nullptr;          ///< [heads, v_dim, v_dim] or null for the identity
  float* weights = nullptr;                ///< [heads * group, queries, keys] exact softmax
};

/// Sizes of a row's change: e G e and e M e.
struct ChangedRow {
  double curved = 0.0, squared = 0.0;
};

enum class Changed {
  nothing,  ///< fills in the exact weights; a change is the exact output itself
  keys,
  values,
};
/// Shared memory of a block, in bytes; a device has so much for each, or not.
int judge_shared_bytes(const JudgedHeads& judged);
/// @param other  quantized keys [heads, keys, dim] or values [heads, keys, v_dim]
/// @param rows   [heads * group, queries] result
void judge(const JudgedHeads& judged, Changed changed, const float* other, ChangedRow* rows, CUstream_st* stream);

}  // namespace kvq::cuda
