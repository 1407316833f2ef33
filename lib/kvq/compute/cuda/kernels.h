#pragma once

#include <kvq/plan/page_layout.h>

#include <cstddef>
#include <cstdint>

struct CUstream_st;

/// Kernels of the CUDA backend, as host code enqueues them. Pointers are of the device. No CUDA header, so that one
/// compiler parses kernels and another one what calls them.
namespace kvq::cuda {

/// Type of the numbers in a Rows.
enum class Number { f16, bf16, f32 };

/// Rows of some heads: the row of a head and token is at data + head * head_stride + token * token_stride, both counted
/// in numbers.
struct Rows {
  Number type = Number::f32;
  const void* data = nullptr;
  std::int64_t head_stride = 0, token_stride = 0;
  std::int64_t tokens = 0;
  int heads = 0, dim = 0;

  Rows head(int h) const;
};

/// Which tokens count, and how much.
struct Weights {
  const float* of_tokens = nullptr;      ///< [heads, T] or null: 1
  std::int64_t head_stride = 0;          ///< from the weights of one head to those of the next; 0: all have the same
  const std::uint8_t* counts = nullptr;  ///< [T] 0: the token's weight is 0; null: all count
  std::int64_t skipped_first = 0, skipped_end = 0;  ///< tokens of weight 0

  bool any() const { return of_tokens != nullptr; }
};

/// Tokens whose products are summed by one cuBLAS product.
inline constexpr int kChunkTokens = 256;

/// Widens tokens [first, first + count) of one head to double. Tokens that do not count, and those up to the next
/// multiple of kChunkTokens, become 0.
/// @param plain     [count, D], or null
/// @param weighted  [count, D] rows times their weights, or null
void widen(const Rows& rows, const Weights& weights, int head, std::int64_t first, std::int64_t count, double* plain,
           double* weighted, CUstream_st* stream);
/// The sum of each chunk's rows, [D] at sums + chunk * stride. @param rows  [chunks * kChunkTokens, D]
void sum_rows(const double* rows, int chunks, int dim, double* sums, std::int64_t stride, CUstream_st* stream);
/// total[i] += the sum of parts[c, i] over c, in the order of c.
void add_parts(const double* parts, int count, std::int64_t size, double* total, CUstream_st* stream);
/// forms[t] = max(0, x_t . y_t) as float. @param x, y  [count, D]
void dot_rows(const double* x, const double* y, std::int64_t count, int dim, float* forms, CUstream_st* stream);
/// |row|^2 of each row of each head, [heads, T], summed in double.
void squared_norms(const Rows& rows, float* norms, CUstream_st* stream);

/// Rows as sums of bfloat16 numbers, which tensor cores multiply exactly: bfloat16 rows are one part, others three.
struct Parts {
  std::uint16_t* data = nullptr;  ///< [parts, heads, T, padded_dim], channels beyond the dimension are 0
  int count = 1, heads = 0, padded_dim = 0;
  std::int64_t tokens = 0;

  KVQ_HD std::int64_t head_size() const { return tokens * padded_dim; }
  KVQ_HD std::int64_t part_size() const { return heads * head_size(); }
};
constexpr int parts_of(Number type) { return type == Number::bf16 ? 1 : 3; }
/// The kernels of attention have these padded dimensions.
constexpr int padded_dim(int k_dim, int v_dim) { return k_dim <= 128 && v_dim <= 128 ? 128 : 256; }
inline constexpr int kMostDim = 256;
void split_rows(const Rows& rows, const Parts& parts, CUstream_st* stream);

/// Attention of some KV heads over one sequence. A query head has group heads of each KV head.
struct Attention {
  Parts q, k, v;  ///< of the query heads, of the KV heads; equal padded_dim, count and tokens
  int group = 1;  ///< query heads of a KV head
  float scale = 1.0f, cap = 0.0f;
  int window = 0;                        ///< 0 = all keys before and at the query, else the last `window`
  const float* sinks = nullptr;          ///< [query heads] or null
  const std::uint8_t* counts = nullptr;  ///< [T] or null
  float* outputs = nullptr;              ///< [query heads, T, padded_dim]
  float* largest = nullptr;              ///< [query heads, T] largest logit of a query, in base 2
  float* inverse_sum = nullptr;          ///< [query heads, T] 1 / sum of exponentials
};
/// outputs, largest and inverse_sum.
void attend(const Attention& attention, CUstream_st* stream);
/// energy[KV heads, T] = sum over the queries that count of S_it^2. Call attend() before.
void column_energies(const Attention& attention, double* energy, CUstream_st* stream);
/// weights[query heads, T]: w_i of AttentionMoments::scored_query, 0 for queries that do not count. Call attend()
/// before.
/// @param v_norms  [KV heads, T] |v_t|^2
void score_queries(const Attention& attention, const float* v_norms, float* weights, CUstream_st* stream);

/// to = (from + from^T) / 2 of each matrix. largest[i]: the largest magnitude in matrix i; infinity if it holds NaN.
void symmetrize(const double* from, double* to, double* largest, int dim, int count, CUstream_st* stream);
/// The canonical form of EigenPairs. @param values  [n, D] ascending  @param vectors  [n, D, D] vector after vector
/// @param pairs  [n, D + D D] values, then the matrix of vectors, row-major
void canonical_pairs(const double* values, const double* vectors, double* pairs, int dim, int count,
                     CUstream_st* stream);

/// defects[i] = the largest magnitudes of A V - V diag(values) and of V^T V - I of matrix i, which were computed
/// already. @param residuals, products  [n, D, D] column-major; V^T V in `products`
void largest_defects(const double* residuals, const double* products, const double* vectors, const double* values,
                     int dim, int count, double* defects, CUstream_st* stream);

}  // namespace kvq::cuda
