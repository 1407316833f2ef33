#include <kvq/compute/cuda/kernels.h>

#include <kvq/device/ptx.cuh>

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math_constants.h>

#include <cstddef>
#include <type_traits>

// Exact causal softmax attention, never storing S. Rows come as sums of bfloat16 parts (split_rows()), whose products
// are exact in float32; a product of rows of three parts adds up the six products of parts that are above its
// rounding. Tensor cores truncate the sums that they make, so sums over many tokens are made in float32 or double by
// ordinary additions with rounding: a tensor core adds up one key block only.
//
// attend_kernel and score_kernel are one loop over key blocks for a tile of query rows; columns_kernel is a loop over
// tiles of query rows for one key block, so that column sums have one order and need no atomics.

namespace kvq::cuda {

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kWarps = 4, kThreads = 32 * kWarps, kTileRows = 16 * kWarps;
constexpr float kLog2e = 1.44269504f;
constexpr int kFewBlocks = 8;  ///< key blocks of a row that sees few keys

/// Keys of a block: as many as fit in shared memory.
template <int kDim>
constexpr int kKeys = kDim <= 128 ? 64 : 32;

/// Products of parts a and b with a + b < count, the smallest first.
template <typename F>
__device__ __forceinline__ void for_each_pair(int a_parts, int b_parts, F f) {
  const int most = max(a_parts, b_parts);
  for (int sum = most - 1; sum >= 0; --sum)
    for (int a = min(sum, a_parts - 1); a >= 0; --a)
      if (sum - a < b_parts) f(a, sum - a);
}

/// Rows of parts in shared memory, [part, row, kDim], in chunks of eight channels, which are swizzled by row.
template <int kDim, int kRows>
struct Tile {
  static constexpr int kChunks = kDim / 8, kPartBytes = kRows * kDim * 2;
  std::byte* memory;

  __device__ __forceinline__ unsigned address(int part, int row, int chunk) const {
    return ptx::shared_address(memory) + part * kPartBytes + row * kDim * 2 + ((chunk ^ (row & 7)) * 16);
  }
  /// Starts copies of rows [first, first + kRows) of a head; rows beyond the tokens become zero.
  __device__ __forceinline__ void copy(const Parts& from, int head, std::int64_t first) const {
    // A thread has one chunk of rows that are kStep apart.
    constexpr int kStep = kThreads / kChunks;
    static_assert(kStep % 4 == 0 && kRows % kStep == 0);
    const int own_row = static_cast<int>(threadIdx.x) / kChunks, own_chunk = static_cast<int>(threadIdx.x) % kChunks;
    for (int part = 0; part < from.count; ++part) {
      const std::uint16_t* rows = from.data + part * from.part_size() + head * from.head_size();
      if (first + kRows <= from.tokens) {
        const std::uint16_t* own = rows + (first + own_row) * kDim + own_chunk * 8;
#pragma unroll
        for (int i = 0; i < kRows / kStep; ++i)
          ptx::cp_async_16(address(part, own_row + i * kStep, own_chunk), own + i * kStep * kDim);
        continue;
      }
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
        const int row = i / kChunks, chunk = i % kChunks;
        const unsigned to = address(part, row, chunk);
        if (first + row < from.tokens)
          ptx::cp_async_16(to, rows + (first + row) * kDim + chunk * 8);
        else
          *reinterpret_cast<uint4*>(memory + (to - ptx::shared_address(memory))) = make_uint4(0, 0, 0, 0);
      }
    }
  }
};

/// Key blocks in shared memory at a time: where there is room for two, one is copied while the other is in work.
KVQ_HD constexpr int stages_of(int parts) { return parts == 1 ? 2 : 1; }

template <int kDim>
struct Shared {
  Tile<kDim, kTileRows> q;
  Tile<kDim, kKeys<kDim>> k, v;
  __device__ __forceinline__ Shared(std::byte* memory, int parts, int stage = 0) {
    q.memory = memory;
    k.memory = memory + parts * q.kPartBytes + stage * parts * (k.kPartBytes + v.kPartBytes);
    v.memory = k.memory + parts * k.kPartBytes;
  }
  static constexpr int bytes(int parts) {
    return parts * (Tile<kDim, kTileRows>::kPartBytes + stages_of(parts) * 2 * Tile<kDim, kKeys<kDim>>::kPartBytes);
  }
  /// Of columns_kernel(), which has no values.
  static constexpr int column_bytes(int parts) {
    return parts * (Tile<kDim, kTileRows>::kPartBytes + Tile<kDim, kKeys<kDim>>::kPartBytes);
  }
};

/// A lane's part of 16 rows by kColumns: of each eight columns, two of row g = lane / 4 and two of row g + 8.
template <int kColumns>
using Sums = float[kColumns / 8][4];

/// sums = 16 query rows of the warp times a key block.
template <int kDim>
__device__ __forceinline__ void multiply_keys(const Shared<kDim>& shared, int parts, int warp, int lane,
                                              Sums<kKeys<kDim>>& sums) {
#pragma unroll
  for (auto& four : sums)
#pragma unroll
    for (float& x : four) x = 0.0f;
  for_each_pair(parts, parts, [&](int a_part, int b_part) {
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      unsigned a[4];
      ptx::ldmatrix_x4(a, shared.q.address(a_part, 16 * warp + (lane & 15), 2 * step + (lane >> 4)));
#pragma unroll
      for (int n = 0; n < kKeys<kDim> / 8; n += 2) {
        unsigned b[4];
        ptx::ldmatrix_x4(b, shared.k.address(b_part, 8 * n + (lane & 7) + (lane >> 4) * 8, 2 * step + (lane >> 3 & 1)));
        ptx::mma_m16n8k16_bf16(sums[n], a[0], a[1], a[2], a[3], b[0], b[1]);
        ptx::mma_m16n8k16_bf16(sums[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
  });
}

/// Weights as bfloat16 parts, in the layout of a product's first operand.
template <int kDim, int kParts>
struct WeightParts {
  unsigned a[kParts][kKeys<kDim> / 16][4];

  __device__ __forceinline__ explicit WeightParts(const Sums<kKeys<kDim>>& weights) {
#pragma unroll
    for (int step = 0; step < kKeys<kDim> / 16; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // rows g and g + 8, then the next eight keys
        float x = weights[2 * step + i / 2][i % 2 * 2], y = weights[2 * step + i / 2][i % 2 * 2 + 1];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const __nv_bfloat162 two = __floats2bfloat162_rn(x, y);
          a[part][step][i] = *reinterpret_cast<const unsigned*>(&two);
          x -= __low2float(two), y -= __high2float(two);
        }
      }
  }
};

/// sums[row, channel] += weights times the values of a key block.
template <int kDim, int kParts>
__device__ __forceinline__ void add_values(const Shared<kDim>& shared, int v_parts,
                                           const WeightParts<kDim, kParts>& weights, int lane, Sums<kDim>& sums) {
  constexpr int kColumns = 32;  // at a time
#pragma unroll
  for (int first = 0; first < kDim; first += kColumns) {
    Sums<kColumns> block = {};
    // As for_each_pair(), but parts of weights are registers, so their number is known to the compiler.
#pragma unroll
    for (int a_part = kParts - 1; a_part >= 0; --a_part)
      for (int b_part = min(v_parts - 1, max(kParts, v_parts) - 1 - a_part); b_part >= 0; --b_part)
#pragma unroll
        for (int step = 0; step < kKeys<kDim> / 16; ++step) {
          const unsigned(&a)[4] = weights.a[a_part][step];
#pragma unroll
          for (int n = 0; n < kColumns / 8; n += 2) {
            unsigned b[4];
            ptx::ldmatrix_x4_trans(b, shared.v.address(b_part, 16 * step + (lane & 15), first / 8 + n + (lane >> 4)));
            ptx::mma_m16n8k16_bf16(block[n], a[0], a[1], a[2], a[3], b[0], b[1]);
            ptx::mma_m16n8k16_bf16(block[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
          }
        }
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[first / 8 + n][i] += block[n][i];
  }
}

/// Products of queries and keys become logits in base 2.
template <int kTiles>
__device__ __forceinline__ void to_logits(const Attention& p, float (&products)[kTiles][4]) {
  const auto for_all = [&](auto f) {
#pragma unroll
    for (auto& four : products)
#pragma unroll
      for (float& x : four) x = f(x);
  };
  if (p.cap > 0.0f)
    for_all([&](float x) { return p.cap * kLog2e * tanhf(x * p.scale / p.cap); });
  else
    for_all([&](float x) { return x * (p.scale * kLog2e); });
}

/// Which keys of a block a lane's two rows see.
template <int kDim>
struct Sight {
  bool all;    ///< of the warp's rows: they see all keys of the block
  int own[2];  ///< the row's own key, relative to the lane's first key of the block
  int window;

  /// @param first_row  of the warp
  __device__ __forceinline__ Sight(const Attention& p, std::int64_t first_row, std::int64_t first_key, int lane)
      : window(p.window) {
    const int ahead = static_cast<int>(first_row - first_key);
    all = ahead >= kKeys<kDim> - 1 && (window == 0 || ahead + 15 < window);
    own[0] = ahead + lane / 4 - 2 * (lane % 4), own[1] = own[0] + 8;
  }
  /// Logits of keys that a row does not see become -infinity.
  template <int kTiles>
  __device__ __forceinline__ void hide(float (&logits)[kTiles][4]) const {
    if (all) return;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!sees(i / 2, 8 * n + i % 2)) logits[n][i] = -CUDART_INF_F;
  }
  /// @param column  of the key in the block, without the lane's part: 8 n + i
  __device__ __forceinline__ bool sees(int r, int column) const {
    return column <= own[r] && (window == 0 || column > own[r] - window);
  }
};
__device__ __forceinline__ bool counts(const Attention& p, std::int64_t token) {
  return token < p.q.tokens && !(p.counts && p.counts[token] == 0);
}

__device__ __forceinline__ float largest_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAll, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAll, x, 2));
}
template <typename X>
__device__ __forceinline__ X sum_of_row(X x) {
  x += __shfl_xor_sync(kAll, x, 1);
  return x + __shfl_xor_sync(kAll, x, 2);
}

/// Key blocks that a tile of query rows sees.
template <int kDim>
struct KeyBlocks {
  int begin, end;
  __device__ __forceinline__ KeyBlocks(const Attention& p, std::int64_t first_row) {
    const std::int64_t first = p.window > 0 ? max(std::int64_t{0}, first_row - p.window + 1) : 0;
    begin = static_cast<int>(first / kKeys<kDim>);
    end = static_cast<int>((min(first_row + kTileRows, p.q.tokens) + kKeys<kDim> - 1) / kKeys<kDim>);
  }
};

template <int kDim>
__device__ __forceinline__ void copy_block(const Attention& p, const Shared<kDim>& shared, int kv_head, int block) {
  shared.k.copy(p.k, kv_head, std::int64_t{block} * kKeys<kDim>);
  shared.v.copy(p.v, kv_head, std::int64_t{block} * kKeys<kDim>);
}

/// Calls f(shared memory, block) for key blocks in order. All threads of the block call it.
template <int kDim, typename F>
__device__ __forceinline__ void for_each_block(const Attention& p, std::byte* memory, int kv_head,
                                               const KeyBlocks<kDim>& blocks, F f) {
  const bool ahead = stages_of(p.q.count) == 2;
  if (ahead && blocks.begin < blocks.end) copy_block(p, Shared<kDim>(memory, p.q.count), kv_head, blocks.begin);
#pragma unroll 1
  for (int block = blocks.begin; block < blocks.end; ++block) {
    const int stage = ahead ? (block - blocks.begin) & 1 : 0;
    const Shared<kDim> shared(memory, p.q.count, stage);
    if (!ahead) {
      __syncthreads();  // all warps have read the block before
      copy_block(p, shared, kv_head, block);
    }
    ptx::cp_async_wait_all();
    __syncthreads();
    if (ahead && block + 1 < blocks.end) copy_block(p, Shared<kDim>(memory, p.q.count, stage ^ 1), kv_head, block + 1);
    f(shared, block);
  }
}

/// Grid: [tiles of query rows, the last ones first, because they see most keys; query heads].
template <int kDim>
__global__ void __launch_bounds__(kThreads) attend_kernel(const __grid_constant__ Attention p) {
  extern __shared__ __align__(128) std::byte memory[];
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int head = static_cast<int>(blockIdx.y), kv_head = head / p.group;
  const std::int64_t tile = static_cast<std::int64_t>(gridDim.x) - 1 - blockIdx.x, first_row = tile * kTileRows;
  Shared<kDim>(memory, p.q.count).q.copy(p.q, head, first_row);

  const std::int64_t row[2] = {first_row + 16 * warp + lane / 4, first_row + 16 * warp + lane / 4 + 8};
  // A learned sink is a key that was seen before all others and has no value.
  const float sink = p.sinks ? p.sinks[head] * kLog2e : -CUDART_INF_F;
  float largest[2] = {sink, sink};
  double total[2] = {p.sinks && lane % 4 == 0 ? 1.0 : 0.0, p.sinks && lane % 4 == 0 ? 1.0 : 0.0};
  Sums<kDim> outputs = {};
  const KeyBlocks<kDim> blocks(p, first_row);
  for_each_block<kDim>(p, memory, kv_head, blocks, [&](const Shared<kDim>& shared, int block) {
    Sums<kKeys<kDim>> weights;
    multiply_keys<kDim>(shared, p.q.count, warp, lane, weights);
    to_logits(p, weights);
    Sight<kDim>(p, first_row + 16 * warp, std::int64_t{block} * kKeys<kDim>, lane).hide(weights);
    float now[2] = {largest[0], largest[1]};
#pragma unroll
    for (int n = 0; n < kKeys<kDim> / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) now[i / 2] = fmaxf(now[i / 2], weights[n][i]);
    float offset[2], keep[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      now[r] = largest_of_row(now[r]);
      keep[r] = now[r] > largest[r] ? ptx::ex2(largest[r] - now[r]) : 1.0f;
      largest[r] = now[r];
      offset[r] = now[r] == -CUDART_INF_F ? 0.0f : now[r];  // a row that sees no key yet
    }
    // Most blocks raise no row's largest logit.
    if (__any_sync(kAll, keep[0] != 1.0f || keep[1] != 1.0f))
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        total[r] *= double{keep[r]};
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) outputs[n][2 * r] *= keep[r], outputs[n][2 * r + 1] *= keep[r];
      }
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < kKeys<kDim> / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[n][i] = ptx::ex2(weights[n][i] - offset[i / 2]);
        sum[i / 2] += weights[n][i];
      }
    total[0] += double{sum[0]}, total[1] += double{sum[1]};
    // Two parts of a weight have 16 bits; the rounding errors of many keys are independent and average out. Where a row
    // sees few keys, or where rows have more than one part, a weight has three.
    if (p.v.count == 1 && blocks.end - blocks.begin > kFewBlocks)
      add_values<kDim>(shared, 1, WeightParts<kDim, 2>(weights), lane, outputs);
    else
      add_values<kDim>(shared, p.v.count, WeightParts<kDim, 3>(weights), lane, outputs);
  });
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const double all = sum_of_row(total[r]);
    if (row[r] >= p.q.tokens) continue;
    const float inverse = static_cast<float>(1.0 / all);
    const std::int64_t at = head * p.q.tokens + row[r];
    if (lane % 4 == 0) p.largest[at] = largest[r], p.inverse_sum[at] = inverse;
    float* out = p.outputs + at * kDim + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
      *reinterpret_cast<float2*>(out + 8 * n) =
          make_float2(outputs[n][2 * r] * inverse, outputs[n][2 * r + 1] * inverse);
  }
}

/// w_i = scale^2 sum_t (S_it c_it)^2 |v_t - o_i|^2, expanded: A - 2 B.o + C |o|^2 with A = sum S^2 |v|^2, B = sum S^2
/// v, C = sum S^2, where S stands for S c. Grid as of attend_kernel.
template <int kDim>
__global__ void __launch_bounds__(kThreads)
    score_kernel(const __grid_constant__ Attention p, const float* v_norms, float* weights_out) {
  extern __shared__ __align__(128) std::byte memory[];
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int head = static_cast<int>(blockIdx.y), kv_head = head / p.group;
  const std::int64_t tile = static_cast<std::int64_t>(gridDim.x) - 1 - blockIdx.x, first_row = tile * kTileRows;
  Shared<kDim>(memory, p.q.count).q.copy(p.q, head, first_row);

  // Of the cap at a logit, 1 - tanh^2.
  const float cap_scale = p.cap > 0.0f ? 1.0f / (p.cap * kLog2e) : 0.0f;
  std::int64_t row[2];
  float largest[2] = {}, inverse[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row[r] = first_row + 16 * warp + lane / 4 + 8 * r;
    if (row[r] < p.q.tokens)
      largest[r] = p.largest[head * p.q.tokens + row[r]], inverse[r] = p.inverse_sum[head * p.q.tokens + row[r]];
  }
  double a[2] = {}, c[2] = {};
  Sums<kDim> b = {};
  const KeyBlocks<kDim> blocks(p, first_row);
  for_each_block<kDim>(p, memory, kv_head, blocks, [&](const Shared<kDim>& shared, int block) {
    Sums<kKeys<kDim>> squares;
    multiply_keys<kDim>(shared, p.q.count, warp, lane, squares);
    to_logits(p, squares);
    const std::int64_t first_key = std::int64_t{block} * kKeys<kDim>;
    Sight<kDim>(p, first_row + 16 * warp, first_key, lane).hide(squares);
    const float* norms = v_norms + kv_head * p.k.tokens + first_key + 2 * (lane % 4);
    const int keys = static_cast<int>(min(p.k.tokens - first_key, std::int64_t{kKeys<kDim>})) - 2 * (lane % 4);
    float a_sum[2] = {}, c_sum[2] = {};
#pragma unroll
    for (int n = 0; n < kKeys<kDim> / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float norm = 8 * n + j < keys ? norms[8 * n + j] : 0.0f;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& x = squares[n][2 * r + j];
          const float part = x * cap_scale,
                      slope = fmaxf(0.0f, 1.0f - part * part);  // 0 for a hidden key: fmaxf drops a NaN
          const float s = ptx::ex2(x - largest[r]) * inverse[r] * slope;
          x = s * s;
          a_sum[r] = fmaf(x, norm, a_sum[r]);
          c_sum[r] += x;
        }
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) a[r] += double{a_sum[r]}, c[r] += double{c_sum[r]};
    // All three parts, because the terms of w may cancel.
    add_values<kDim>(shared, p.v.count, WeightParts<kDim, 3>(squares), lane, b);
  });
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    double bo = 0.0, oo = 0.0;
    if (row[r] < p.q.tokens) {
      const float* o = p.outputs + (head * p.q.tokens + row[r]) * kDim + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const double x = o[8 * n + i];
          bo += double{b[n][2 * r + i]} * x, oo += x * x;
        }
    }
    const double all_a = sum_of_row(a[r]), all_c = sum_of_row(c[r]), all_bo = sum_of_row(bo), all_oo = sum_of_row(oo);
    if (row[r] >= p.q.tokens || lane % 4 != 0) continue;
    const double scale = p.scale, w = scale * scale * (all_a - 2.0 * all_bo + all_c * all_oo);
    weights_out[head * p.q.tokens + row[r]] = counts(p, row[r]) ? static_cast<float>(fmax(w, 0.0)) : 0.0f;
  }
}

/// Grid: [key blocks, KV heads].
template <int kDim>
__global__ void __launch_bounds__(kThreads) columns_kernel(const __grid_constant__ Attention p, double* energy) {
  extern __shared__ __align__(128) std::byte memory[];
  __shared__ double of_warp[kWarps][kKeys<kDim>];
  const Shared<kDim> shared(memory, p.q.count);
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int kv_head = static_cast<int>(blockIdx.y);
  const std::int64_t first_key = std::int64_t{blockIdx.x} * kKeys<kDim>, tokens = p.q.tokens;
  shared.k.copy(p.k, kv_head, first_key);
  const std::int64_t first_tile = first_key / kTileRows,
                     last_row = p.window > 0 ? min(tokens, first_key + kKeys<kDim> - 1 + p.window) : tokens,
                     tiles = (last_row + kTileRows - 1) / kTileRows;
  double sums[kKeys<kDim> / 8][2] = {};
#pragma unroll 1
  for (int g = 0; g < p.group; ++g) {
    const int head = kv_head * p.group + g;
#pragma unroll 1
    for (std::int64_t tile = first_tile; tile < tiles; ++tile) {
      __syncthreads();  // all warps have read the tile before
      shared.q.copy(p.q, head, tile * kTileRows);
      std::int64_t row[2];
      // A query that does not count has weights 0.
      float largest[2] = {CUDART_INF_F, CUDART_INF_F}, inverse[2] = {};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row[r] = tile * kTileRows + 16 * warp + lane / 4 + 8 * r;
        if (counts(p, row[r]))
          largest[r] = p.largest[head * tokens + row[r]], inverse[r] = p.inverse_sum[head * tokens + row[r]];
      }
      ptx::cp_async_wait_all();
      __syncthreads();
      Sums<kKeys<kDim>> products;
      multiply_keys<kDim>(shared, p.q.count, warp, lane, products);
      to_logits(p, products);
      Sight<kDim>(p, tile * kTileRows + 16 * warp, first_key, lane).hide(products);
#pragma unroll
      for (int n = 0; n < kKeys<kDim> / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float two = 0.0f;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float s = ptx::ex2(products[n][2 * r + i] - largest[r]) * inverse[r];
            two = fmaf(s, s, two);
          }
          sums[n][i] += double{two};
        }
    }
  }
  ptx::cp_async_wait_all();  // of a block that no query sees
#pragma unroll
  for (int n = 0; n < kKeys<kDim> / 8; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      double x = sums[n][i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(kAll, x, step);
      if (lane < 4) of_warp[warp][8 * n + 2 * lane + i] = x;
    }
  __syncthreads();
  const int key = static_cast<int>(threadIdx.x);
  if (key >= kKeys<kDim> || first_key + key >= tokens) return;
  double x = 0.0;
#pragma unroll
  for (const auto& warps : of_warp) x += warps[key];
  energy[kv_head * tokens + first_key + key] = x;
}

/// Calls launch(constant padded dimension).
template <typename F>
void with_dim(const Attention& attention, F launch) {
  if (attention.q.padded_dim == 128)
    launch(std::integral_constant<int, 128>{});
  else
    launch(std::integral_constant<int, 256>{});
}

template <typename Kernel>
void allow_shared(Kernel kernel, int bytes) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

dim3 row_tiles(const Attention& attention) {
  return {static_cast<unsigned>((attention.q.tokens + kTileRows - 1) / kTileRows),
          static_cast<unsigned>(attention.q.heads)};
}

}  // namespace

void attend(const Attention& attention, CUstream_st* stream) {
  with_dim(attention, [&](auto dim) {
    const int bytes = Shared<dim.value>::bytes(attention.q.count);
    allow_shared(attend_kernel<dim.value>, bytes);
    attend_kernel<dim.value><<<row_tiles(attention), kThreads, bytes, stream>>>(attention);
  });
}

void column_energies(const Attention& attention, double* energy, CUstream_st* stream) {
  with_dim(attention, [&](auto dim) {
    const int bytes = Shared<dim.value>::column_bytes(attention.q.count);
    const dim3 grid(static_cast<unsigned>((attention.k.tokens + kKeys<dim.value> - 1) / kKeys<dim.value>),
                    static_cast<unsigned>(attention.k.heads));
    allow_shared(columns_kernel<dim.value>, bytes);
    columns_kernel<dim.value><<<grid, kThreads, bytes, stream>>>(attention, energy);
  });
}

void score_queries(const Attention& attention, const float* v_norms, float* weights, CUstream_st* stream) {
  with_dim(attention, [&](auto dim) {
    const int bytes = Shared<dim.value>::bytes(attention.q.count);
    allow_shared(score_kernel<dim.value>, bytes);
    score_kernel<dim.value><<<row_tiles(attention), kThreads, bytes, stream>>>(attention, v_norms, weights);
  });
}

}  // namespace kvq::cuda
