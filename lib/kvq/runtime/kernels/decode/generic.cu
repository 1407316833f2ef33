#include <kvq/runtime/kernels/common/softmax_state.h>
#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/common/generic_rotate.cuh>
#include <kvq/runtime/kernels/decode/generic_rows.cuh>
#include <kvq/runtime/kernels/decode/generic_tiles.cuh>

#include <cuda_runtime.h>

#include <algorithm>

/// Generic decode attention over pages of any format, split-KV in three kernels: the first rotates the queries, the
/// second attends to splits of the tokens, the third merges the partial results and rotates them back. All arithmetic
/// is in float.
namespace kvq {

namespace generic {

constexpr int kLeastTiles = 16;   ///< of a split: four for each warp
constexpr int kMostSplits = 256;  ///< of a work tile

/// Arguments of all three kernels.
struct DecodeWork {
  DecodeKernelParams p;
  CacheFormat format;
  int heads = 0;                    ///< query heads of a KV head
  int head_groups = 0, splits = 0;  ///< of a work tile: groups of kHeads query heads; most splits of its tokens
  float* queries = nullptr;         ///< [passes, Hq, D of K] rotated, times softmax scale and log2(e)
  float* centers = nullptr;         ///< [passes, Hq] q . center_k in base 2, for capped scores
  /// [passes Hkv, splits] partial results: values [heads, D of V] by permuted channel, then largest score and sum
  float* partials = nullptr;
  KVQ_HD constexpr int record_floats() const { return heads * (format.v.head_dim + 2); }
  __device__ __forceinline__ float* record(int work_tile, int split) const {
    return partials + (static_cast<std::int64_t>(work_tile) * splits + split) * record_floats();
  }
  __device__ __forceinline__ int tiles_in_split(int tiles) const {
    return max(kLeastTiles, (tiles + splits - 1) / splits);
  }
};

/// Grid [passes Hq].
template <typename T>
__global__ void __launch_bounds__(kThreads) generic_queries_kernel(const __grid_constant__ DecodeWork work) {
  __shared__ float row[kGenericHeadDim];
  const DecodeKernelParams& p = work.p;
  const int dim = work.format.k.head_dim, thread = static_cast<int>(threadIdx.x);
  const int number = static_cast<int>(blockIdx.x) / p.num_q_heads, head = static_cast<int>(blockIdx.x) % p.num_q_heads;
  const decode::Pass pass = decode::load_pass(p, number);
  if (pass.queries.count == 0) return;
  const T* q = static_cast<const T*>(p.q) + pass.first_row * p.q_stride + head * dim;
  for (int c = thread; c < dim; c += kThreads) row[c] = to_float(q[c]) * (p.softmax_scale * kLog2e);
  if (p.logit_softcap > 0.0f) {
    __syncthreads();
    if (thread == 0) {
      float center = 0.0f;
      for (int c = 0; p.cache.center_k && c < dim; ++c)
        center = fmaf(row[c], p.cache.center_k[head / work.heads * dim + c], center);
      work.centers[blockIdx.x] = center;
    }
    __syncthreads();
  }
  rotate_rows<1>(row, dim, dim, p.cache.rotation_k, head / work.heads, false);
  for (int c = thread; c < dim; c += kThreads) work.queries[static_cast<std::int64_t>(blockIdx.x) * dim + c] = row[c];
}

/// Shared memory of a block of the second kernel: queries, then for each warp its stages of coded tiles and the scales
/// and minima of one side. The warps' results later overwrite the stages.
constexpr int kStages = 2;
KVQ_HD constexpr int query_bytes(const CacheFormat& format) { return kHeads * format.k.head_dim * 4; }
KVQ_HD constexpr int stage_bytes(const CacheFormat& format) {
  return (format.k.exact() ? 0 : format.k.bytes()) + (format.v.exact() ? 0 : format.v.bytes());
}
KVQ_HD constexpr int warp_bytes(const CacheFormat& format) {
  const int k = format.k.groups(), v = format.v.groups();
  return kStages * stage_bytes(format) + (k > v ? k : v) * kTileTokens * 8;
}
constexpr int attend_shared_bytes(const CacheFormat& format) {
  return query_bytes(format) + std::max(kWarps * warp_bytes(format), kWarps * kHeads * (format.v.head_dim + 2) * 4);
}

/// Merges the results of a block's warps and stores them as heads first_head .. first_head + heads - 1 of a record. All
/// threads call it, behind a barrier. @param values  shared memory [warps, kHeads, D of V + 2]
template <int kMaxDim>
__device__ __forceinline__ void leave_record(const DecodeWork& work, Softmax<kMaxDim>& state, float* values,
                                             float* record, int first_head, int heads, int warps) {
  const int dim = work.format.v.head_dim, thread = static_cast<int>(threadIdx.x), lane = thread % 32,
            warp = thread / 32;
  float2* states = reinterpret_cast<float2*>(values + warps * kHeads * dim);  // largest scores and sums
  state.leave(values + warp * kHeads * dim, states + warp * kHeads, dim, lane);
  __syncthreads();
  for (int i = thread; i < heads * dim; i += 32 * warps) {
    const int h = i / dim;
    const auto state_of = [&](int w) {
      const float2 theirs = states[w * kHeads + h];
      return SoftmaxState{theirs.x, theirs.y};
    };
    SoftmaxState merged;
    float value = 0.0f;
    for (int w = 0; w < warps; ++w) merged.raise(state_of(w).max);
    for (int w = 0; w < warps; ++w)
      value = fmaf(merged.add(state_of(w), ptx::ex2), values[w * kHeads * dim + i], value);
    record[first_head * dim + i] = value;
    if (i % dim == 0)
      reinterpret_cast<float2*>(record + work.heads * dim)[first_head + h] = make_float2(merged.max, merged.sum);
  }
}

/// A block attends to one split of a work tile (a KV head of a pass), for up to kHeads of its query heads.
/// Grid: work tiles x splits x head groups, head groups varying fastest. @tparam kMaxDim  D of V at most
template <int kMaxDim>
__global__ void __launch_bounds__(kThreads, kMaxDim <= 128 ? 3 : 2)
    generic_attend_kernel(const __grid_constant__ DecodeWork work) {
  extern __shared__ __align__(16) std::byte memory[];
  const DecodeKernelParams& p = work.p;
  const TileSide &k_side = work.format.k, &v_side = work.format.v;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int head_group = static_cast<int>(blockIdx.x) % work.head_groups,
            split_index = static_cast<int>(blockIdx.x) / work.head_groups;
  const int split = split_index % work.splits, work_tile = split_index / work.splits;
  const int number = work_tile / p.cache.num_kv_heads, head = work_tile % p.cache.num_kv_heads;
  const int first_head = head_group * kHeads, heads = min(kHeads, work.heads - first_head);  // of the group
  __shared__ decode::RowSight sight;
  const SeenTiles tiles(p, number, sight);
  const int each = work.tiles_in_split(tiles.count()), begin = split * each, end = min(begin + each, tiles.count());
  if (begin >= end) return;

  // 1. Queries; those of padding heads are zeros.
  float* queries = reinterpret_cast<float*>(memory);
  const float* from =
      work.queries +
      (static_cast<std::int64_t>(number) * p.num_q_heads + head * work.heads + first_head) * k_side.head_dim;
  for (int i = thread; i < kHeads * k_side.head_dim; i += kThreads)
    queries[i] = i < heads * k_side.head_dim ? from[i] : 0.0f;
  __syncthreads();

  // 2. The warp's tiles. The next coded tile and the page number of the tile after it are always prefetched.
  const TileReader reader(p, PageLayout{k_side, v_side, p.cache.num_kv_heads, 1 << p.cache.page_shift}, tiles.sequence,
                          head);
  const float center =
      p.logit_softcap > 0.0f
          ? work.centers[number * p.num_q_heads + head * work.heads + first_head + min(lane % 4, heads - 1)]
          : 0.0f;
  const int bytes = reader.k_bytes + reader.v_bytes;
  std::byte* stages = memory + query_bytes(work.format) + warp * warp_bytes(work.format);
  float2* params = reinterpret_cast<float2*>(stages + kStages * bytes);
  const auto page_of = [&](int i) { return i < end ? reader.page_of(tiles[i]) : 0; };
  const auto fetch = [&](int i, int page, int stage) {
    if (i < end) reader.fetch(tiles[i], page, stages + stage * bytes, lane);
    ptx::cp_async_commit_group();
  };
  Softmax<kMaxDim> state;
  int page = page_of(begin + warp), next_page = page_of(begin + warp + kWarps);
  fetch(begin + warp, page, 0);
  for (int i = begin + warp, stage = 0; i < end; i += kWarps, stage ^= 1) {
    fetch(i + kWarps, next_page, stage ^ 1);
    const int later_page = page_of(i + 2 * kWarps);
    ptx::cp_async_wait_group<1>();
    __syncwarp();
    const SeenTile tile = tiles[i];
    if (page < 0) {  // the tile cannot be read
      state.sum = kNaN;
      page = next_page, next_page = later_page;
      continue;
    }
    const std::byte *k_tile = stages + stage * bytes, *v_tile = k_tile + reader.k_bytes;
    float scores[2][kHeads] = {}, weights[kHeads][4];
    if (!tile.coded() || k_side.exact()) {
      score_exact(reader.in_memory(tile, page).k, k_side.head_dim, queries, lane, scores);
    } else {
      read_params(k_tile, k_side, work.format.k_bfloat, tile, params, lane);
      if (k_side.bits == 2)
        score_codes<2>(k_tile, k_side, params, queries, lane, scores);
      else if (k_side.bits == 3)
        score_codes<3>(k_tile, k_side, params, queries, lane, scores);
      else
        score_codes<4>(k_tile, k_side, params, queries, lane, scores);
    }
    state.add_scores(scores, tile, p.logit_softcap, center, lane, weights);
    if (!tile.coded() || v_side.exact()) {
      add_exact<kMaxDim>(reader.in_memory(tile, page).v, v_side.head_dim, tile, weights, lane, state.values);
    } else {
      __syncwarp();  // all lanes have read the keys' factors, which read_params() overwrites
      read_params(v_tile, v_side, work.format.v_bfloat, tile, params, lane);
      if (v_side.bits == 2)
        add_codes<2, kMaxDim>(v_tile, v_side, params, weights, lane, state.values);
      else if (v_side.bits == 3)
        add_codes<3, kMaxDim>(v_tile, v_side, params, weights, lane, state.values);
      else
        add_codes<4, kMaxDim>(v_tile, v_side, params, weights, lane, state.values);
    }
    page = next_page, next_page = later_page;
    __syncwarp();  // before the next copies overwrite this stage
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();

  // 3. Results of all warps overwrite the stages.
  leave_record(work, state, reinterpret_cast<float*>(memory + query_bytes(work.format)), work.record(work_tile, split),
               first_head, heads, kWarps);
}

/// Shared memory of a block of generic_attend_rows_kernel: queries, the channel of each place of a value, then what
/// row_warp_bytes() says for each warp. The warps' results later overwrite the latter.
constexpr int kMostShared = 99 * 1024;  ///< of a block, on every architecture
KVQ_HD constexpr int row_head_bytes(const CacheFormat& format) { return query_bytes(format) + kGenericHeadDim; }
constexpr int attend_rows_shared_bytes(const CacheFormat& format, int warps) {
  return row_head_bytes(format) + warps * std::max(row_warp_bytes(format), kHeads * (format.v.head_dim + 2) * 4);
}
/// Warps of a block: as many as have room.
constexpr int row_warps(const CacheFormat& format) {
  int warps = kWarps;
  while (warps > 1 && attend_rows_shared_bytes(format, warps) > kMostShared) warps /= 2;
  return warps;
}

/// generic_attend_kernel() for formats of which decodes_rows() is true: a warp decodes a tile of 16 tokens into shared
/// memory, then attends to it in plain loops.
template <int kMaxDim>
__global__ void __launch_bounds__(kThreads, kMaxDim <= 128 ? 3 : 2)
    generic_attend_rows_kernel(const __grid_constant__ DecodeWork work) {
  extern __shared__ __align__(16) std::byte memory[];
  const DecodeKernelParams& p = work.p;
  const TileSide &k_side = work.format.k, &v_side = work.format.v;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32,
            threads = static_cast<int>(blockDim.x), warps = threads / 32;
  const int head_group = static_cast<int>(blockIdx.x) % work.head_groups,
            split_index = static_cast<int>(blockIdx.x) / work.head_groups;
  const int split = split_index % work.splits, work_tile = split_index / work.splits;
  const int number = work_tile / p.cache.num_kv_heads, head = work_tile % p.cache.num_kv_heads;
  const int first_head = head_group * kHeads, heads = min(kHeads, work.heads - first_head);  // of the group
  __shared__ decode::RowSight sight;
  const SeenTiles tiles(p, number, sight);
  const int each = work.tiles_in_split(tiles.count()), begin = split * each, end = min(begin + each, tiles.count());
  if (begin >= end) return;

  // 1. Queries; those of padding heads are zeros.
  float* queries = reinterpret_cast<float*>(memory);
  std::uint8_t* channels = reinterpret_cast<std::uint8_t*>(memory + query_bytes(work.format));
  const float* from =
      work.queries +
      (static_cast<std::int64_t>(number) * p.num_q_heads + head * work.heads + first_head) * k_side.head_dim;
  for (int i = thread; i < kHeads * k_side.head_dim; i += threads)
    queries[i] = i < heads * k_side.head_dim ? from[i] : 0.0f;
  for (int i = thread; i < v_side.head_dim; i += threads)
    channels[i] = static_cast<std::uint8_t>(value_channel(v_side, i));
  __syncthreads();

  // 2. The warp's tiles. The copy of a tile's values lasts while its keys are attended to, that of the next tile's keys
  // while its values are.
  const TileReader reader(p, PageLayout{k_side, v_side, p.cache.num_kv_heads, 1 << p.cache.page_shift}, tiles.sequence,
                          head);
  const float center =
      p.logit_softcap > 0.0f
          ? work.centers[number * p.num_q_heads + head * work.heads + first_head + min(lane % 4, heads - 1)]
          : 0.0f;
  const CodedSide k_of{k_side, p.cache.code_k, work.format.k_bfloat, false, head},
      v_of{v_side, p.cache.code_v, work.format.v_bfloat, true, head};
  const int stride = row_stride(work.format);
  std::byte* stage = memory + row_head_bytes(work.format) + warp * row_warp_bytes(work.format);
  float* rows = reinterpret_cast<float*>(stage + tile_bytes(work.format));
  std::byte* scratch = reinterpret_cast<std::byte*>(rows) + row_bytes(work.format);
  const auto page_of = [&](int i) { return i < end ? reader.page_of(tiles[i]) : 0; };
  const auto fetch_keys = [&](int i, int page) {
    if (i < end && page >= 0 && tiles[i].coded())
      fetch_side(reader.in_memory(tiles[i], page).k, reader.k_bytes, stage, lane);
    ptx::cp_async_commit_group();
  };
  const auto arrived = [] {
    ptx::cp_async_wait_group<0>();
    __syncwarp();
  };
  Softmax<kMaxDim> state;
  int page = page_of(begin + warp), next_page = page_of(begin + warp + warps);
  fetch_keys(begin + warp, page);
  for (int i = begin + warp; i < end; i += warps) {
    const int later_page = page_of(i + 2 * warps);
    const SeenTile tile = tiles[i];
    arrived();
    if (page < 0) {  // the tile cannot be read
      state.sum = kNaN;
      page = next_page, next_page = later_page;
      fetch_keys(i + warps, page);
      continue;
    }
    const TilePair at = reader.in_memory(tile, page);
    const unsigned seen = seen_tokens(tile, lane);
    const bool k_coded = tile.coded() && !k_side.exact(), v_coded = tile.coded() && !v_side.exact();
    if (k_coded) rows_of_tile(stage, k_of, seen, rows, stride, scratch, lane);
    if (v_coded) fetch_side(at.v, reader.v_bytes, stage, lane);
    ptx::cp_async_commit_group();
    float scores[2][kHeads] = {}, weights[kHeads][4];
    if (k_coded)
      score_rows(rows, stride, k_side.head_dim, queries, lane, scores);
    else
      score_exact(at.k, k_side.head_dim, queries, lane, scores);
    state.add_scores(scores, tile, p.logit_softcap, center, lane, weights);
    arrived();  // and all lanes have read the keys' rows
    if (v_coded) rows_of_tile(stage, v_of, seen, rows, stride, scratch, lane);
    page = next_page, next_page = later_page;
    fetch_keys(i + warps, page);
    if (v_coded)
      add_rows<kMaxDim>(rows, stride, v_side.head_dim, channels, weights, lane, state.values);
    else
      add_exact<kMaxDim>(at.v, v_side.head_dim, tile, weights, lane, state.values);
    __syncwarp();  // before the next keys overwrite the rows
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();

  // 3. Results of all warps overwrite their memory.
  leave_record(work, state, reinterpret_cast<float*>(memory + row_head_bytes(work.format)),
               work.record(work_tile, split), first_head, heads, warps);
}
/// Grid [passes Hq].
template <typename T>
__global__ void __launch_bounds__(kThreads) generic_combine_kernel(const __grid_constant__ DecodeWork work) {
  __shared__ float row[kGenericHeadDim], of_warp[kWarps], weights[kMostSplits];
  const DecodeKernelParams& p = work.p;
  const TileSide& side = work.format.v;
  const int dim = side.head_dim, thread = static_cast<int>(threadIdx.x);
  const int number = static_cast<int>(blockIdx.x) / p.num_q_heads,
            query_head = static_cast<int>(blockIdx.x) % p.num_q_heads;
  const int head = query_head / work.heads, in_group = query_head % work.heads;
  __shared__ decode::RowSight sight;
  const SeenTiles seen(p, number, sight);
  if (seen.fault && query_head == 0 && thread == 0)
    record_fault(p.cache.faults, seen.fault, seen.sequence, p.cache.layer);
  if (!seen.exists) return;
  T* out = static_cast<T*>(p.out) + seen.row * p.out_stride + query_head * dim;
  float* lse = p.lse ? p.lse + static_cast<std::int64_t>(seen.row) * p.num_q_heads + query_head : nullptr;
  const int tiles = seen.count(), each = work.tiles_in_split(tiles), count = (tiles + each - 1) / each;
  if (seen.fault) {
    for (int c = thread; c < dim; c += kThreads) from_float(kNaN, out[c]);
    if (lse && thread == 0) *lse = kNaN;
    return;
  }
  const auto leave_nothing = [&] {
    for (int c = thread; c < dim; c += kThreads) from_float(0.0f, out[c]);
    if (lse && thread == 0) *lse = p.sink_logits ? p.sink_logits[query_head] : kMinusInf;
  };
  if (count == 0) {  // no visible token
    leave_nothing();
    return;
  }

  // 1. q . center is the same for every key, so it cancels in the softmax, but LSE and sink logits need it.
  const auto across = [&](float x, auto add) {  // reduction over all threads
    for (int step = 1; step < 32; step *= 2) x = add(x, __shfl_xor_sync(kAll, x, step));
    __syncthreads();
    if (thread % 32 == 0) of_warp[thread / 32] = x;
    __syncthreads();
    x = of_warp[0];
    for (int w = 1; w < kWarps; ++w) x = add(x, of_warp[w]);
    return x;
  };
  const auto sum_of = [](float a, float b) { return a + b; };
  float shift = 0.0f;
  if (p.cache.center_k && (p.lse || p.sink_logits) && !(p.logit_softcap > 0.0f)) {
    const int k_dim = work.format.k.head_dim;
    const T* q = static_cast<const T*>(p.q) + seen.row * p.q_stride + query_head * k_dim;
    for (int c = thread; c < k_dim; c += kThreads)
      shift = fmaf(to_float(q[c]), p.cache.center_k[head * k_dim + c], shift);
    shift = across(shift, sum_of) * (p.softmax_scale * kLog2e);
  }

  // 2. Combine the partial results. They are stored by permuted channel, `row` gets the channels in order.
  const int work_tile = number * p.cache.num_kv_heads + head;
  const auto state_of = [&](int split) {
    return reinterpret_cast<const float2*>(work.record(work_tile, split) + work.heads * dim)[in_group];
  };
  const float sink = p.sink_logits ? p.sink_logits[query_head] * kLog2e - shift : kMinusInf;
  float most = kMinusInf, tokens = 0.0f;
  for (int split = thread; split < count; split += kThreads) most = fmaxf(most, state_of(split).x);
  most = across(most, [](float a, float b) { return fmaxf(a, b); });
  const float reference = fmaxf(most, sink);  // a learned sink may be far above all scores
  if (reference == kMinusInf) {               // masks hide all tokens
    leave_nothing();
    return;
  }
  for (int split = thread; split < count; split += kThreads) {
    const float2 state = state_of(split);
    weights[split] = ptx::ex2(state.x - reference);
    tokens = fmaf(weights[split], state.y, tokens);
  }
  tokens = across(tokens, sum_of);
  const float sum = tokens + exp2f(sink - reference), inverse = 1.0f / sum;
  for (int permuted = thread; permuted < dim; permuted += kThreads) {
    float value = 0.0f;
#pragma unroll 8
    for (int split = 0; split < count; ++split)
      value = fmaf(weights[split], work.record(work_tile, split)[in_group * dim + permuted], value);
    row[value_channel(side, permuted)] = value * inverse;
  }
  if (lse && thread == 0) *lse = (reference + shift + log2f(sum)) * kLn2;

  // 3. Back to the model's basis. A learned sink has no value, so only the tokens' share of the center is added.
  rotate_rows<1>(row, dim, dim, p.cache.rotation_v, head, true);
  for (int c = thread; c < dim; c += kThreads)
    from_float(fmaf(tokens * inverse, p.cache.center_v ? p.cache.center_v[head * dim + c] : 0.0f, row[c]), out[c]);
}

namespace {

auto attend_kernel(const CacheFormat& format) {
  if (decodes_rows(format))
    return format.v.head_dim <= 128 ? generic_attend_rows_kernel<128> : generic_attend_rows_kernel<kGenericHeadDim>;
  return format.v.head_dim <= 128 ? generic_attend_kernel<128> : generic_attend_kernel<kGenericHeadDim>;
}

int attend_threads(const CacheFormat& format) { return decodes_rows(format) ? 32 * row_warps(format) : kThreads; }

/// What sizes the workspace; the other fields are of tuned kernels.
DecodeKernelShape generic_shape(const CacheFormat& format, int heads) {
  DecodeKernelShape shape;
  shape.consumer_warps = attend_threads(format) / 32;
  shape.shared_bytes =
      decodes_rows(format) ? attend_rows_shared_bytes(format, row_warps(format)) : attend_shared_bytes(format);
  shape.operand_bytes = heads * (format.k.head_dim + 1) * 4;
  shape.partial_bytes = heads * (format.v.head_dim + 2) * 4;
  return shape;
}

template <typename T>
Status plan(DecodeLaunch& launch) {
  constexpr int kMostOfCodes = attend_shared_bytes({{256, 4, 32, 2, 4}, {256, 4, 32, 2, 4}});
  static_assert(kMostOfCodes <= kMostShared);
  // Eight bits, and a scale and a minimum of four bytes for each channel.
  static_assert(attend_rows_shared_bytes({{256, 0, 256, 512, 4, false, 64, 2}, {256, 0, 256, 512, 4, false, 64, 2}},
                                         1) <= kMostShared);
  static_assert(attend_shared_bytes({{256, 4, 32, 2}, {256, 4, 32, 2}}) <= 48 * 1024, "without asking for more");
  const CacheFormat& format = launch.format;
  const DecodeKernelShape shape = generic_shape(format, launch.heads);
  launch.shared_bytes = shape.shared_bytes, launch.operand_bytes = shape.operand_bytes;
  launch.partial_bytes = shape.partial_bytes;
  int device = 0, each = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&launch.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  // The maximum over all plans, because the attribute belongs to the kernel on the device. Of code tiles only fp32
  // numbers need it.
  if (error == cudaSuccess && launch.shared_bytes > 48 * 1024)
    error = cudaFuncSetAttribute(attend_kernel(format), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 decodes_rows(format) ? kMostShared : kMostOfCodes);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, attend_kernel(format), attend_threads(format),
                                                          static_cast<std::size_t>(launch.shared_bytes));
  if (error == cudaSuccess) error = load_kernel(attend_kernel(format));
  if (error == cudaSuccess) error = load_kernel(generic_queries_kernel<T>);
  if (error == cudaSuccess) error = load_kernel(generic_combine_kernel<T>);
  launch.blocks = each * launch.multiprocessors;
  launch.cut_partials = launch.blocks;  // see `splits` below
  return cuda_status(error, "decode: generic: plan");
}

template <typename T>
Status run(const DecodeLaunch& launch, const DecodeParams& params, CUstream_st* stream) {
  DecodeWork work{.p = {params}, .format = launch.format};
  work.p.heads_per_kv_head = params.num_q_heads / params.cache.num_kv_heads;
  work.p.passes = {1, params.max_new_tokens};
  const int work_tiles = work.p.num_passes() * params.cache.num_kv_heads;
  if (work_tiles == 0 || params.tokens() == 0) return {};
  work.heads = params.num_q_heads / params.cache.num_kv_heads;
  work.head_groups = (work.heads + kHeads - 1) / kHeads;
  work.splits = std::clamp(launch.blocks / (work_tiles * work.head_groups), 1,
                           kMostSplits);  // work_tiles * splits <= blocks + work_tiles
  std::byte* at = static_cast<std::byte*>(params.workspace);
  work.partials = reinterpret_cast<float*>(at);
  at += (static_cast<std::size_t>(launch.cut_partials) + static_cast<std::size_t>(work_tiles)) *
        static_cast<std::size_t>(launch.partial_bytes);
  work.queries = reinterpret_cast<float*>(at);
  const auto rows = static_cast<unsigned>(work.p.num_passes() * params.num_q_heads);
  work.centers = work.queries + std::size_t{rows} * static_cast<std::size_t>(launch.format.k.head_dim);
  cudaError_t error = launch_kernel(generic_queries_kernel<T>, rows, kThreads, 0, false, stream, work);
  if (error == cudaSuccess)
    error =
        launch_kernel(attend_kernel(launch.format), static_cast<unsigned>(work_tiles * work.splits * work.head_groups),
                      attend_threads(launch.format), launch.shared_bytes, false, stream, work);
  if (error == cudaSuccess) error = launch_kernel(generic_combine_kernel<T>, rows, kThreads, 0, false, stream, work);
  return cuda_status(error, "decode: generic: launch");
}

}  // namespace

}  // namespace generic

DecodeVariant generic_decode(const CacheFormat& format, int heads, bool bf16) {
  DecodeVariant variant{
      .name = bf16 ? "decode_generic_bf16" : "decode_generic_fp16",
      .k = format.k,
      .v = format.v,
      .k_bfloat = format.k_bfloat,
      .v_bfloat = format.v_bfloat,
      .max_rows = heads,
      .bf16 = bf16,
  };
  variant.plan_kernel = bf16 ? generic::plan<__nv_bfloat16> : generic::plan<__half>;
  variant.run = bf16 ? generic::run<__nv_bfloat16> : generic::run<__half>;
  variant.tuned = false;
  variant.shape = generic::generic_shape(format, heads);
  return variant;
}

}  // namespace kvq
