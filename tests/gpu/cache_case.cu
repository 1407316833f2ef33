#include "cache_case.h"
#include "device_memory.h"
#include "plain_attention.cuh"

#include "support/transforms.h"

#include <kvq/runtime/kernels/prefill/variant.h>
#include <kvq/runtime/prepare.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

namespace kvq::test {

namespace {

__host__ __device__ double of_16_bits(unsigned short bits, bool bf16) {
  return static_cast<double>(bf16 ? __bfloat162float(__ushort_as_bfloat16(bits))
                                  : __half2float(__ushort_as_half(bits)));
}
__host__ __device__ unsigned short in_16_bits(double x, bool bf16) {
  return bf16 ? __bfloat16_as_ushort(__float2bfloat16(static_cast<float>(x)))
              : __half_as_ushort(__float2half(static_cast<float>(x)));
}

__device__ unsigned hash(unsigned long long x) {
  x ^= x >> 31, x *= 0x7fb5d329728ea185ull, x ^= x >> 27, x *= 0x81dadef4bc2dd44dull;
  return static_cast<unsigned>(x >> 33);
}
__device__ float uniform(unsigned long long key) { return static_cast<float>(hash(key) & 0xFFFFFF) / 16777216.0f; }

/// Writes one token of one head and side, quantized or exact; all other bytes keep their values.
__global__ void fill_cached_token(PagedCacheView p, PageLayout layout, bool k_bfloat, bool v_bfloat, std::byte* pages,
                                  CaseWindows windows, const int* hidden, unsigned seed) {
  const int position = static_cast<int>(blockIdx.x), b = static_cast<int>(blockIdx.y);
  const int head = static_cast<int>(blockIdx.z) / 2, thread = static_cast<int>(threadIdx.x);
  const bool value = blockIdx.z % 2, bfloat = value ? v_bfloat : k_bfloat;
  const int length = p.seq_lens[b], threads = static_cast<int>(blockDim.x);
  if (position >= length || position < hidden[b]) return;
  const TileSide& side = value ? layout.v : layout.k;
  const auto put = [](std::byte* at, float x, bool bf16) {
    *reinterpret_cast<unsigned short*>(at) = in_16_bits(static_cast<double>(x), bf16);
  };
  const unsigned long long key =
      ((static_cast<unsigned long long>(b) * 65536 + position) * 512 + head * 2 + value) * 4096 + seed;
  // The codes of exact tokens stay NaN: no kernel may read them.
  const SequenceTokens tokens = case_tokens(p, b);
  if (tokens.is_exact(position)) {
    std::byte* pool = position < tokens.sink_end ? windows.sinks : windows.rings;
    const float size = position % 3 == 0 ? 1000.0f : 1.0f;  // rows of different sizes
    for (int c = thread; c < side.head_dim; c += threads)
      put(pool + case_window_offset(p, tokens, b, head, position, c, value),
          (value ? size : 1.0f) * (2.0f * uniform(key + c) - 1.0f), true);
    return;
  }
  const std::int64_t base = p.page_indptr ? p.page_indptr[b] : b * p.page_table_stride;
  const std::int64_t page = p.page_table[base + position / layout.page_size];
  const int slot = position % layout.page_size, token = slot % kTileTokens;
  std::byte* tile =
      pages + page * p.page_stride + (value ? layout.value_tile(head, slot) : layout.key_tile(head, slot));
  if (side.exact()) {
    for (int c = thread; c < side.head_dim; c += threads)
      put(tile + exact_offset(side.head_dim, token, c), 2.0f * uniform(key + c) - 1.0f, true);
    return;
  }
  for (int i = thread; i < 4 * side.piece_bytes(); i += threads) {
    const int lane = i / side.piece_bytes(), byte = i % side.piece_bytes();
    tile[value ? value_code_offset(side, token, lane, byte) : key_code_offset(side, token, lane, byte)] =
        static_cast<std::byte>(hash(key + i));
  }
  for (int g = thread; g < side.groups(); g += threads) {
    const float levels = static_cast<float>((1 << side.bits) - 1);
    const float scale = (0.3f + uniform(key + 2000 + g)) * 2.0f / levels, other = uniform(key + 3000 + g);
    put_group_number(tile + number_offset(side, token, g, 0), scale, side, bfloat);
    if (side.numbers == 2)
      put_group_number(
          tile + number_offset(side, token, g, 1),
          side.integer_zero ? rintf(0.5f * levels + 6.0f * other - 3.0f) : -0.5f * levels * scale + 0.2f * other - 0.1f,
          side, bfloat);
  }
  if (side.index_bytes == 1 && thread == 0) tile[index_offset(side, token)] = static_cast<std::byte>(hash(key + 4000));
}

/// Rows times the matrix of an entry, one block for each. @param each  rows of an entry
__global__ void rotate_each_row(const float* from, DeviceRotation rotation, int each, int dim, float* to) {
  __shared__ double row[256], scratch[256];
  const int index = static_cast<int>(blockIdx.x);
  for (int c = static_cast<int>(threadIdx.x); c < dim; c += static_cast<int>(blockDim.x))
    row[c] = static_cast<double>(from[index * dim + c]);
  __syncthreads();
  plain::rotate_plain(row, scratch, rotation, index / each, dim, true);
  for (int c = static_cast<int>(threadIdx.x); c < dim; c += static_cast<int>(blockDim.x))
    to[index * dim + c] = static_cast<float>(row[c]);
}

/// Centroids of each head, if a side has indices; fewer than an index can count.
/// @param undo  x = x_rot @ matrix
void put_centroids(Arena& arena, const TileSide& side, int heads, const DeviceRotation& undo, std::mt19937& random,
                   RowCode& code) {
  if (side.index_bytes == 0) return;
  std::normal_distribution<float> normal;
  code.num_centroids = 200, code.per_head = true;
  const int rows = heads * code.num_centroids, elements = rows * side.head_dim;
  std::vector<float> rotated(static_cast<std::size_t>(elements));
  for (float& x : rotated) x = normal(random);
  float* unrotated = arena.take<float>(rotated.size(), 0);
  code.rotated_centroids = arena.put(rotated), code.centroids = unrotated;
  run_kernel("rotate_each_row", rotate_each_row, static_cast<unsigned>(rows), kPlainThreads, code.rotated_centroids,
             undo, code.num_centroids, side.head_dim, unrotated);
}

/// Orthogonal matrices, row-major. @param transposed  the same matrices transposed
std::vector<float> random_matrices(int heads, int dim, bool transposed, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<float> all;
  const auto n = static_cast<std::size_t>(dim);
  for (int h = 0; h < heads; ++h) {
    std::vector<std::vector<double>> rows(n, std::vector<double>(n));
    for (std::size_t i = 0; i < n; ++i) {
      for (double& x : rows[i]) x = normal(random);
      for (std::size_t k = 0; k < i; ++k) {
        double dot = 0.0;
        for (std::size_t c = 0; c < n; ++c) dot += rows[i][c] * rows[k][c];
        for (std::size_t c = 0; c < n; ++c) rows[i][c] -= dot * rows[k][c];
      }
      double norm = 0.0;
      for (const double x : rows[i]) norm += x * x;
      for (double& x : rows[i]) x /= std::sqrt(norm);
    }
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t c = 0; c < n; ++c) all.push_back(static_cast<float>(transposed ? rows[c][i] : rows[i][c]));
  }
  return all;
}

/// A cache and all that it points to.
struct MadeCache {
  Arena arena;
  PagedCacheView cache;
  PageLayout layout;
  DeviceRotation undo_k, undo_v;  ///< for the reference loops: x = x_rot @ matrix
  std::byte* pages = nullptr;
  CaseWindows windows = {};
  bool k_bfloat = false, v_bfloat = false;
  unsigned seed = 0;
  int longest = 1;
  int* hidden = nullptr;

  MadeCache(const DequantizeVariant& variant, const CacheCase& c)
      : layout{variant.k, variant.v, c.num_kv_heads, c.page_size},
        k_bfloat(variant.k_bfloat),
        v_bfloat(variant.v_bfloat),
        seed(c.seed * 7919) {
    std::mt19937 random(c.seed);
    const int dim = variant.k.head_dim, v_dim = variant.v.head_dim, batch = static_cast<int>(c.lengths.size());
    for (const int n : c.lengths) longest = std::max(longest, n);
    const int max_pages = (longest + c.page_size - 1) / c.page_size;

    // Pages in random order; entries behind a sequence's end must never be read as pages.
    constexpr int kNoPage = 0x3FFFFFFF;
    std::vector<int> order, table, indptr = {0};
    for (const int n : c.lengths)
      for (int i = 0; i < (n + c.page_size - 1) / c.page_size; ++i) order.push_back(static_cast<int>(order.size()));
    std::shuffle(order.begin(), order.end(), random);
    auto next = order.begin();
    for (const int n : c.lengths) {
      const int count = (n + c.page_size - 1) / c.page_size;
      const auto first = static_cast<std::ptrdiff_t>(table.size());
      table.insert(table.end(), next, next + count);
      next += count;
      if (!c.hidden.empty()) std::fill_n(table.begin() + first, c.hidden[indptr.size() - 1] / c.page_size, kNoPage);
      if (!c.indptr) table.resize(indptr.size() * static_cast<std::size_t>(max_pages), kNoPage);
      indptr.push_back(static_cast<int>(table.size()));
    }
    table.push_back(kNoPage);

    cache.batch = batch, cache.num_kv_heads = c.num_kv_heads;
    cache.seq_lens = arena.put(c.lengths);
    cache.windows = {c.sink_tokens, c.recent_tokens};
    cache.page_table = arena.put(table), cache.page_table_stride = max_pages;
    if (c.indptr) cache.page_indptr = arena.put(indptr), cache.page_table_stride = indptr.back() + 1;
    cache.page_shift = std::countr_zero(static_cast<unsigned>(c.page_size));
    cache.page_stride = layout.page_bytes() + 16;
    pages = arena.take<std::byte>(order.size() * static_cast<std::size_t>(cache.page_stride), 0xFF);
    cache.pages = pages;
    windows = put_windows(arena, cache, variant.k, variant.v, c.lengths, static_cast<int>(order.size()), c.seed);

    if (c.rotation == CaseRotation::scaled) {
      const std::vector<float> factors = random_scales(c.num_kv_heads, std::max(dim, v_dim), 4, c.seed);
      cache.rotation_k = {.order = dim & -dim, .per_head = true, .factors = arena.put(factors)};
      cache.rotation_v = {.order = (v_dim & -v_dim) / 2, .per_head = true, .factors = cache.rotation_k.factors};
      undo_k = cache.rotation_k, undo_v = cache.rotation_v;
    } else if (c.rotation == CaseRotation::transform) {
      // Keys are scaled for scores of moderate size, values such that fp16 cannot represent elements of A^-1.
      const auto sized = [](std::vector<float> inverse, int power) {
        for (float& x : inverse) x = std::ldexp(x, power);
        return inverse;
      };
      const std::vector<float> of_keys =
                                   sized(random_transforms(c.num_kv_heads, dim, kCaseCondition, c.seed).inverse, -6),
                               of_values = sized(random_transform(v_dim, kCaseCondition, c.seed + 100).inverse,
                                                 variant.bf16 ? -30 : -8);
      std::vector<float> of_queries(of_keys.size());
      for (std::size_t i = 0, n = static_cast<std::size_t>(dim); i < of_keys.size(); ++i)
        of_queries[i] = of_keys[i / (n * n) * n * n + i % n * n + i / n % n];
      cache.rotation_k = {
          .per_head = true,
          .matrix = arena.put(of_queries),
          .sizes = arena.put(column_sizes(of_keys, dim)),
      };
      cache.rotation_v = {.matrix = arena.put(of_values), .sizes = arena.put(column_sizes(of_values, v_dim))};
      undo_k = {.per_head = true, .matrix = arena.put(of_keys)}, undo_v = cache.rotation_v;
    } else if (c.rotation == CaseRotation::hadamard) {
      std::vector<std::int8_t> signs(static_cast<std::size_t>(c.num_kv_heads * std::max(dim, v_dim)));
      for (auto& s : signs) s = random() & 1 ? 1 : -1;
      cache.rotation_k = {dim & -dim, true, arena.put(signs), nullptr};
      cache.rotation_v = {(v_dim & -v_dim) / 2, true, cache.rotation_k.signs, nullptr};
      undo_k = cache.rotation_k, undo_v = cache.rotation_v;
    } else if (c.rotation == CaseRotation::dense) {
      cache.rotation_k = {0, true, nullptr, arena.put(random_matrices(c.num_kv_heads, dim, false, c.seed))};
      undo_k = {0, true, nullptr, arena.put(random_matrices(c.num_kv_heads, dim, true, c.seed))};
      cache.rotation_v = {0, false, nullptr, arena.put(random_matrices(1, v_dim, true, c.seed + 1))};
      undo_v = cache.rotation_v;
    }
    if (c.centers) {
      std::normal_distribution<float> normal;
      std::vector<float> center(static_cast<std::size_t>(c.num_kv_heads * std::max(dim, v_dim)));
      for (float& x : center) x = normal(random);
      cache.center_k = arena.put(center), cache.center_v = arena.put(center);
    }
    put_centroids(arena, variant.k, c.num_kv_heads, undo_k, random, cache.code_k);
    put_centroids(arena, variant.v, c.num_kv_heads, undo_v, random, cache.code_v);
    if (batch == 0) return;
    const dim3 grid(static_cast<unsigned>(longest), static_cast<unsigned>(batch),
                    static_cast<unsigned>(2 * c.num_kv_heads));
    std::vector<int> none(c.lengths.size());
    hidden = arena.put(c.hidden.empty() ? none : c.hidden);
    run_kernel("fill_cached_token", fill_cached_token, grid, kPlainThreads, cache, layout, k_bfloat, v_bfloat, pages,
               windows, hidden, seed);
  }
};

/// Rows of the cache in double: grid [longest, B, 2 Hkv]; k, v [B, longest, Hkv, D].
__global__ void plain_rows(PagedCacheView p, DeviceRotation undo_k, DeviceRotation undo_v, PageLayout layout,
                           bool k_bfloat, bool v_bfloat, int longest, const int* hidden, double* k, double* v) {
  __shared__ double row[256], scratch[256];
  const int position = static_cast<int>(blockIdx.x), b = static_cast<int>(blockIdx.y);
  const int head = static_cast<int>(blockIdx.z) / 2;
  const bool value = blockIdx.z % 2;
  const int dim = (value ? layout.v : layout.k).head_dim;
  if (position >= p.seq_lens[b] || position < hidden[b]) return;
  DecodeParams d;
  d.cache = p;
  for (int c = static_cast<int>(threadIdx.x); c < dim; c += static_cast<int>(blockDim.x))
    row[c] = plain::stored_value<double>(d, layout, k_bfloat, v_bfloat, b, head, position, c, value);
  __syncthreads();
  plain::rotate_plain(row, scratch, value ? undo_v : undo_k, head, dim, true);
  const float* center = value ? p.center_v : p.center_k;
  for (int c = static_cast<int>(threadIdx.x); c < dim; c += static_cast<int>(blockDim.x))
    (value ? v : k)[((static_cast<std::int64_t>(b) * longest + position) * p.num_kv_heads + head) * dim + c] =
        row[c] + (center ? static_cast<double>(center[head * dim + c]) : 0.0);
}

struct Rows {
  std::vector<double> k, v;  ///< [B, longest, Hkv, D]
};
Rows rows_of(MadeCache& made) {
  const auto rows = static_cast<std::size_t>(made.cache.batch * made.longest * made.cache.num_kv_heads);
  const std::size_t k_count = rows * static_cast<std::size_t>(made.layout.k.head_dim),
                    v_count = rows * static_cast<std::size_t>(made.layout.v.head_dim);
  double* k = made.arena.take<double>(k_count, 0);
  double* v = made.arena.take<double>(v_count, 0);
  if (made.cache.batch) {
    const dim3 grid(static_cast<unsigned>(made.longest), static_cast<unsigned>(made.cache.batch),
                    static_cast<unsigned>(2 * made.cache.num_kv_heads));
    run_kernel("plain_rows", plain_rows, grid, kPlainThreads, made.cache, made.undo_k, made.undo_v, made.layout,
               made.k_bfloat, made.v_bfloat, made.longest, made.hidden, k, v);
  }
  return {get(k, k_count), get(v, v_count)};
}

/// Sums of squared differences.
struct Distance {
  double error = 0.0, plain = 0.0, size = 0.0;
  void add(double found, double truth, double plain_value) {
    error += (found - truth) * (found - truth);
    plain += (plain_value - truth) * (plain_value - truth);
    size += truth * truth;
  }
  void into(CacheOutcome& outcome) const {
    const double most = std::max(size, 1e-30);
    outcome.error = std::max(outcome.error, std::sqrt(error / most));
    outcome.plain_error = std::max(outcome.plain_error, std::sqrt(plain / most));
  }
};

/// Reference attention of new tokens in plain loops; grid [T, Hq], kPlainThreads threads. Keys and values [B, longest,
/// Hkv, D].
template <typename Float>
__global__ void plain_prefill(const int* q_indptr, const int* prefixes, int batch, int num_q_heads, int num_kv_heads,
                              int dim, int v_dim, int longest, double scale, double cap, int window,
                              const float* sink_logits, const double* q, const double* k, const double* v,
                              Float* scores, double* out, double* lse) {
  __shared__ Float reduce[kPlainThreads];
  const int token = static_cast<int>(blockIdx.x), query_head = static_cast<int>(blockIdx.y),
            thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  int b = 0;
  while (token >= q_indptr[b + 1]) ++b;
  const int end = prefixes[b] + token - q_indptr[b] + 1, first = window > 0 ? max(0, end - window) : 0;
  const int head = query_head / (num_q_heads / num_kv_heads);
  const double* row = q + (static_cast<std::int64_t>(token) * num_q_heads + query_head) * dim;
  const auto at = [&](int t) { return (static_cast<std::int64_t>(b) * longest + t) * num_kv_heads + head; };
  Float* mine = scores + (static_cast<std::int64_t>(token) * num_q_heads + query_head) * longest;
  Float largest = sink_logits ? static_cast<Float>(sink_logits[query_head]) : -INFINITY;
  for (int t = first + thread; t < end; t += threads) {
    Float sum = 0;
    for (int c = 0; c < dim; ++c) sum += static_cast<Float>(row[c]) * static_cast<Float>(k[at(t) * dim + c]);
    mine[t] = sum * static_cast<Float>(scale);
    if (cap > 0) mine[t] = static_cast<Float>(cap) * tanh(mine[t] / static_cast<Float>(cap));
    largest = max(largest, mine[t]);
  }
  reduce[thread] = largest;
  __syncthreads();
  for (int i = 0; i < threads; ++i) largest = max(largest, reduce[i]);
  for (int t = first + thread; t < end; t += threads) mine[t] = exp(mine[t] - largest);
  __syncthreads();
  Float sum = sink_logits ? exp(static_cast<Float>(sink_logits[query_head]) - largest) : Float(0);
  for (int t = first; t < end; ++t) sum += mine[t];
  for (int c = thread; c < v_dim; c += threads) {
    Float value = 0;
    for (int t = first; t < end; ++t) value += mine[t] * static_cast<Float>(v[at(t) * v_dim + c]);
    out[(static_cast<std::int64_t>(token) * num_q_heads + query_head) * v_dim + c] = static_cast<double>(value / sum);
  }
  if (thread == 0)
    lse[static_cast<std::int64_t>(token) * num_q_heads + query_head] = static_cast<double>(largest + log(sum));
}

}  // namespace

CacheOutcome run_dequantize_case(const DequantizeVariant& variant, const CacheCase& cache, const DequantizeCase& c) {
  MadeCache made(variant, cache);
  Arena& arena = made.arena;
  const int heads = cache.num_kv_heads;
  const auto batch = cache.lengths.size();
  std::vector<int> indptr = {5};  // rows before the first row must keep their values
  for (std::size_t b = 0; b < batch; ++b) {
    const int first = c.first.empty() ? 0 : c.first[b], last = c.last.empty() ? cache.lengths[b] : c.last[b];
    indptr.push_back(indptr.back() + std::max(0, last - first));
  }
  const auto stride_of = [&](Side side) {
    return std::int64_t{heads} * (side == Side::v ? variant.v : variant.k).head_dim + c.gap;
  };
  const auto count_of = [&](Side side) { return static_cast<std::size_t>((indptr.back() + 3) * stride_of(side)); };
  auto* k = arena.take<unsigned short>(count_of(Side::k), 0xFF);
  auto* v = arena.take<unsigned short>(count_of(Side::v), 0xFF);
  DequantizeParams p;
  p.cache = made.cache;
  if (!c.first.empty()) p.first = arena.put(c.first);
  if (!c.last.empty()) p.last = arena.put(c.last);
  p.out_indptr = arena.put(indptr);
  p.k = k, p.v = v, p.k_stride = stride_of(Side::k), p.v_stride = stride_of(Side::v);
  p.num_rows = indptr.back() + 3;
  DequantizeLaunch launch;
  Status status = variant.plan(launch);
  if (status.ok()) status = check_dequantize(variant, p);
  if (status.ok()) status = variant.run(launch, p, nullptr);
  check(cudaDeviceSynchronize(), "dequantize");
  CacheOutcome outcome;
  if (!status.ok()) {
    outcome.failure = status.message();
    return outcome;
  }
  outcome.failure = made.windows.fault();
  const Rows truth = rows_of(made);
  for (const Side side : kSides) {
    const bool value = side == Side::v;
    const std::size_t count = count_of(side);
    const std::int64_t stride = stride_of(side);
    const int dim = (value ? variant.v : variant.k).head_dim;
    const std::vector<unsigned short> found = get(value ? v : k, count);
    std::vector<bool> written(count);
    Distance distance;
    for (std::size_t b = 0; b < batch; ++b)
      for (int i = 0; i < indptr[b + 1] - indptr[b]; ++i)
        for (int j = 0; j < heads * dim; ++j) {
          const auto at = static_cast<std::size_t>((indptr[b] + i) * stride + j);
          const auto from = (b * static_cast<std::size_t>(made.longest) +
                             static_cast<std::size_t>((c.first.empty() ? 0 : c.first[b]) + i)) *
                                static_cast<std::size_t>(heads * dim) +
                            static_cast<std::size_t>(j);
          const double x = (value ? truth.v : truth.k)[from];
          written[at] = true;
          const double y = of_16_bits(found[at], variant.bf16);
          if (!std::isfinite(y) && outcome.failure.empty())
            outcome.failure = "element " + std::to_string(at) + (value ? " of v" : " of k") + " is not finite";
          distance.add(y, x, of_16_bits(in_16_bits(x, variant.bf16), variant.bf16));
        }
    distance.into(outcome);
    for (std::size_t i = 0; i < count; ++i)
      if (!written[i] && found[i] != 0xFFFF && outcome.failure.empty())
        outcome.failure = "element " + std::to_string(i) + (value ? " of v" : " of k") + " was written";
  }
  return outcome;
}

CacheOutcome run_prefill_case(const DequantizeVariant& rows, const CacheCase& in, const PrefillCase& c) {
  CacheCase cache = in;
  for (std::size_t b = 0; b < cache.lengths.size(); ++b) {
    const int prefix = cache.lengths[b] - (c.written.empty() ? 0 : c.written[b]);
    cache.hidden.push_back(c.sliding_window > 0 ? std::max(0, prefix + 1 - c.sliding_window) : 0);
  }
  MadeCache made(rows, cache);
  Arena& arena = made.arena;
  const PrefillVariant* row = find_prefill_variant(rows);
  const PrefillVariant variant = row && !c.generic ? *row : generic_prefill(rows);
  std::mt19937 random(cache.seed + 1);
  std::normal_distribution<float> normal;
  const int dim = rows.k.head_dim, v_dim = rows.v.head_dim;
  const int kv_heads = cache.num_kv_heads, q_heads = kv_heads * c.heads;
  const auto batch = cache.lengths.size();
  std::vector<int> prefixes = cache.lengths;
  for (std::size_t b = 0; b < c.written.size(); ++b) prefixes[b] -= c.written[b];
  int tokens = 0, longest_chunk = 0, longest = 1;
  for (std::size_t b = 0; b < batch; ++b) {
    tokens += c.chunks[b];
    longest_chunk = std::max(longest_chunk, c.chunks[b]);
    longest = std::max(longest, prefixes[b] + c.chunks[b]);
  }
  const auto random_rows = [&](int row) {
    std::vector<unsigned short> all(static_cast<std::size_t>(tokens * row));
    for (auto& x : all) x = in_16_bits(static_cast<double>(normal(random)), rows.bf16);
    return all;
  };
  const std::vector<unsigned short> q = random_rows(q_heads * dim), k = random_rows(kv_heads * dim),
                                    v = random_rows(kv_heads * v_dim);

  PrefillParams p;
  p.cache = made.cache;
  p.num_q_heads = q_heads;
  p.softmax_scale = c.sharpness / std::sqrt(static_cast<float>(dim));
  p.sliding_window = c.sliding_window, p.logit_softcap = c.softcap;
  std::vector<float> logits(static_cast<std::size_t>(q_heads));
  for (float& x : logits) x = 3.0f * normal(random);
  if (c.sinks) p.sink_logits = arena.put(logits);
  int* indptr = arena.take<int>(batch + 1, 0);
  p.num_tokens = tokens, p.q_indptr = indptr;
  p.max_queries = longest_chunk, p.max_keys = longest;
  p.q = arena.put(q), p.k = arena.put(k), p.v = arena.put(v);
  p.q_stride = q_heads * dim, p.k_stride = kv_heads * dim;
  p.v_stride = kv_heads * v_dim, p.out_stride = q_heads * v_dim;
  const auto results = static_cast<std::size_t>(tokens * q_heads), elements = results * static_cast<std::size_t>(v_dim);
  auto* out = arena.take<unsigned short>(elements, 0xFF);
  p.out = out;
  p.lse = arena.take<float>(results, 0xFF);
  if (!c.written.empty()) p.prefix_lens = arena.put(prefixes);

  PrefillLaunch launch;
  launch.shape = {static_cast<int>(batch), q_heads, kv_heads, longest_chunk, longest, c.workspace_bytes, c.portable};
  CacheOutcome outcome;
  Status status = check_prefill_shape(variant, rows, launch.shape);
  if (status.ok()) status = variant.plan(rows, launch);
  if (status.ok()) {
    p.workspace = arena.take<std::byte>(static_cast<std::size_t>(launch.workspace_bytes), 0xFF);
    status = check_prefill(variant, rows, launch, p);
  }
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  const Rows cached = rows_of(made);

  const auto prepare = [&](const std::vector<int>& chunks) {
    std::vector<int> starts = {0};
    for (const int n : chunks) starts.push_back(starts.back() + n);
    check(cudaMemcpy(indptr, starts.data(), starts.size() * sizeof(int), cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaMemset(out, 0xFF, elements * 2), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return starts;
  };
  const auto compare = [&](const std::vector<int>& starts) {
    const int count = starts.back();
    if (count == 0) return;
    // Keys and values as they are, and rounded to 16 bits like the inputs of the kernels.
    std::vector<double> keys[2], values[2];
    const auto fill = [&](bool rounded, int side_dim, const std::vector<double>& from_cache,
                          const std::vector<unsigned short>& fresh) {
      const auto row = static_cast<std::size_t>(kv_heads * side_dim);
      std::vector<double> all(batch * static_cast<std::size_t>(longest) * row);
      for (std::size_t b = 0; b < batch; ++b)
        for (int t = 0; t < prefixes[b] + starts[b + 1] - starts[b]; ++t)
          for (std::size_t j = 0; j < row; ++j) {
            const auto at = [&](std::size_t tokens_each) {
              return (b * tokens_each + static_cast<std::size_t>(t)) * row + j;
            };
            double& x = all[at(static_cast<std::size_t>(longest))];
            if (t < prefixes[b]) {
              x = from_cache[at(static_cast<std::size_t>(made.longest))];
              if (rounded) x = of_16_bits(in_16_bits(x, rows.bf16), rows.bf16);
            } else {
              x = of_16_bits(fresh[static_cast<std::size_t>(starts[b] + t - prefixes[b]) * row + j], rows.bf16);
            }
          }
      return all;
    };
    for (int rounded = 0; rounded < 2; ++rounded)
      keys[rounded] = fill(rounded, dim, cached.k, k), values[rounded] = fill(rounded, v_dim, cached.v, v);
    std::vector<double> queries;
    for (const unsigned short x : q) queries.push_back(of_16_bits(x, rows.bf16));
    Arena mine;
    const int* starts_there = mine.put(starts);
    const int* prefixes_there = mine.put(prefixes);
    const double* queries_there = mine.put(queries);
    double* result = mine.take<double>(elements, 0);
    double* sums = mine.take<double>(results, 0);
    std::vector<double> truth[2], lse[2];
    const dim3 grid(static_cast<unsigned>(count), static_cast<unsigned>(q_heads));
    for (int rounded = 0; rounded < 2; ++rounded) {
      const double* keys_there = mine.put(keys[rounded]);
      const double* values_there = mine.put(values[rounded]);
      const auto go = [&](auto zero) {
        auto* scores = mine.take<decltype(zero)>(results * static_cast<std::size_t>(longest), 0);
        run_kernel("plain_prefill", plain_prefill<decltype(zero)>, grid, kPlainThreads, starts_there, prefixes_there,
                   static_cast<int>(batch), q_heads, kv_heads, dim, v_dim, longest,
                   static_cast<double>(p.softmax_scale), static_cast<double>(c.softcap), c.sliding_window,
                   p.sink_logits, queries_there, keys_there, values_there, scores, result, sums);
      };
      if (rounded)
        go(0.0f);
      else
        go(0.0);
      truth[rounded] = get(result, elements), lse[rounded] = get(sums, results);
    }
    const std::vector<unsigned short> found = get(out, elements);
    const std::vector<float> found_lse = get(p.lse, results);
    Distance distance;
    const auto used = static_cast<std::size_t>(count * q_heads * v_dim);
    for (std::size_t i = 0; i < used; ++i) {
      const double x = of_16_bits(found[i], rows.bf16);
      if (!std::isfinite(x) && outcome.failure.empty())
        outcome.failure = "element " + std::to_string(i) + " is not finite";
      distance.add(x, truth[0][i], of_16_bits(in_16_bits(truth[1][i], rows.bf16), rows.bf16));
    }
    distance.into(outcome);
    for (std::size_t i = used; i < elements; ++i)
      if (found[i] != 0xFFFF && outcome.failure.empty())
        outcome.failure = "element " + std::to_string(i) + " was written";
    for (std::size_t i = 0; i < used / static_cast<std::size_t>(v_dim); ++i) {
      if (!std::isfinite(found_lse[i]) && outcome.failure.empty())
        outcome.failure = "lse " + std::to_string(i) + " is not finite";
      outcome.lse_error = std::max(outcome.lse_error, std::abs(static_cast<double>(found_lse[i]) - lse[0][i]));
      outcome.lse_plain_error = std::max(outcome.lse_plain_error, std::abs(lse[1][i] - lse[0][i]));
    }
  };

  // Twice, because a call must not depend on the contents of the workspace.
  for (int i = 0; i < 2 && status.ok(); ++i) {
    const std::vector<int> starts = prepare(c.chunks);
    status = variant.run(rows, launch, p, stream);
    check(cudaStreamSynchronize(stream), "prefill");
    if (i == 1 && status.ok()) compare(starts);
  }
  if (status.ok() && !c.replay.empty()) {
    const RecordedGraph graph(stream, [&] { status = variant.run(rows, launch, p, stream); });
    const std::vector<int> starts = prepare(c.replay);
    for (int i = 0; i < 3; ++i) graph.launch();
    compare(starts);
  }
  cudaStreamDestroy(stream);
  if (!status.ok()) outcome.failure = status.message();
  if (outcome.failure.empty()) outcome.failure = made.windows.fault();
  return outcome;
}

}  // namespace kvq::test
