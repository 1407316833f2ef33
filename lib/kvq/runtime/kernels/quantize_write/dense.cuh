#pragma once

#include <kvq/runtime/kernels/quantize_write/dense_layout.h>
#include <kvq/runtime/kernels/quantize_write/params.h>
#include <kvq/device/wgmma.cuh>
#include <kvq/runtime/kernels/quantize_write/code_rows.cuh>
#include <kvq/runtime/kernels/quantize_write/kernel.cuh>
#include <kvq/runtime/kernels/quantize_write/rotate.cuh>

#include <type_traits>

/// The write kernel for dense rotations: rows times R by tensor cores, then quantized as in the other kernel. A block
/// keeps the R of one head and side in shared memory while it loops over tokens. If R is too large for that, the slabs
/// of R stream through a double buffer for every run of tokens.
///
/// x has 16 bits and R is split into two 16-bit halves (high and low), so two products give x R with an error below
/// 2^-17 of |x| |R|, the sum of the terms' magnitudes. If R is orthogonal, that is small beside the row itself. If R is
/// not, terms may cancel, by up to R's condition (formats/artifact.md, "Transforms").
namespace kvq::write {

/// Sizes of a block and of its shared memory.
template <int kDim>
struct DenseBlock {
  static constexpr RotationLayout kLayout{kDim};
  static constexpr bool kResident = kLayout.bytes() <= 96 * 1024;
  static constexpr int kWarps = kResident ? 16 : 8, kThreads = 32 * kWarps;
  static constexpr int kStageSlabs = kResident ? kLayout.slabs() : 2;  ///< of a stage: all slabs, or double-buffered
  static constexpr int kStageBytes = kStageSlabs * kLayout.slab_bytes();
  static constexpr int kRowRanges = kDim % 64 == 0 ? 2 : 1;  ///< channel ranges in which a warp's rows are prefetched
  static constexpr int kRowBytes = kTileTokens * kDim * 2 / kRowRanges;
  static constexpr int kSharedBytes = kResident ? kStageBytes + kWarps * kRowBytes : 2 * kStageBytes;
  static constexpr int kColumnBlockWidth = kDim % 128 == 0 ? 128 : kDim % 64 == 0 ? 64 : 32;
  static constexpr int kColumnBlocks = kDim / kColumnBlockWidth;
  static_assert(kLayout.slabs() % kStageSlabs == 0);
  static_assert(kSharedBytes <= 99 * 1024, "what a block has on every architecture");
};

/// A lane's accumulators: for each column block (the columns of one wgmma), of each eight columns, two of row g and
/// two of row g + 8.
template <int kDim>
using Products = float[DenseBlock<kDim>::kColumnBlocks][DenseBlock<kDim>::kColumnBlockWidth / 2];

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHaveWarpgroups = true;
#else
constexpr bool kHaveWarpgroups = false;
#endif

/// c += rows times slabs, for a warp's 16 rows. @param raw  the warp's rows as loaded  @param slabs  shared-memory
/// address
template <typename T, int kDim, int kFirstSlab, int kNumSlabs>
__device__ __forceinline__ void multiply(Products<kDim>& c, const uint4 (&raw)[2][kDim / 32], unsigned slabs,
                                         int lane) {
  using Block = DenseBlock<kDim>;
  constexpr RotationLayout kLayout = Block::kLayout;
  constexpr int kColumnBlockTiles = Block::kColumnBlockWidth / 8;
  const auto operand = [&](int slab, unsigned(&a)[4]) {
    const uint4 row_g = raw[0][slab / 2], row_g8 = raw[1][slab / 2];
    const bool second = slab % 2;
    a[0] = second ? row_g.z : row_g.x, a[1] = second ? row_g8.z : row_g8.x;
    a[2] = second ? row_g.w : row_g.y, a[3] = second ? row_g8.w : row_g8.y;
  };
  if constexpr (kHaveWarpgroups && kDim % 64 == 0) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    ptx::wgmma_fence();
    // Core matrices are 128 bytes apart along the sum, and 256 bytes along the columns.
    const unsigned first = slabs >> 4 | 128u >> 4 << 16;
#pragma unroll
    for (int s = 0; s < kNumSlabs; ++s) {
      unsigned a[4];
      operand(kFirstSlab + s, a);
#pragma unroll
      for (int split_half = 0; split_half < RotationLayout::kSplitHalves; ++split_half)
#pragma unroll
        for (int column_block = 0; column_block < Block::kColumnBlocks; ++column_block) {
          const int offset = s * kLayout.slab_bytes() + split_half * kLayout.split_half_bytes() +
                             column_block * Block::kColumnBlockWidth * 32;
          const unsigned long long descriptor = 256ull >> 4 << 32 | (first + static_cast<unsigned>(offset >> 4));
          const bool add = kFirstSlab + s + split_half > 0;
          if constexpr (std::is_same_v<T, __half>)
            ptx::wgmma_m64k16_fp16<0>(c[column_block], a[0], a[1], a[2], a[3], descriptor, add);
          else
            ptx::wgmma_m64k16_bf16<0>(c[column_block], a[0], a[1], a[2], a[3], descriptor, add);
        }
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
#endif
  } else {
    if constexpr (kFirstSlab == 0) {
#pragma unroll
      for (int column_block = 0; column_block < Block::kColumnBlocks; ++column_block)
#pragma unroll
        for (int i = 0; i < 4 * kColumnBlockTiles; ++i) c[column_block][i] = 0.0f;
    }
#pragma unroll
    for (int s = 0; s < kNumSlabs; ++s) {
      unsigned a[4];
      operand(kFirstSlab + s, a);
#pragma unroll
      for (int split_half = 0; split_half < RotationLayout::kSplitHalves; ++split_half)
#pragma unroll
        for (int n = 0; n < kDim / 8; n += 2) {
          unsigned b[4];
          ptx::ldmatrix_x4(
              b, slabs + s * kLayout.slab_bytes() + split_half * kLayout.split_half_bytes() + n * 256 + lane * 16);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float(&sums)[4] =
                *reinterpret_cast<float(*)[4]>(&c[(n + i) / kColumnBlockTiles][(n + i) % kColumnBlockTiles * 4]);
            Pair<T>::mma(sums, a[0], a[1], a[2], a[3], b[2 * i], b[2 * i + 1]);
          }
        }
    }
  }
}

/// Copies slabs to shared memory for the tensor cores. All threads of the block call it; it has no barrier.
template <int kBytes, int kThreads>
__device__ __forceinline__ void copy_slabs(std::byte* to, const std::byte* from) {
#pragma unroll
  for (int i = 0; i < (kBytes + 16 * kThreads - 1) / (16 * kThreads); ++i) {
    const int offset = (i * kThreads + static_cast<int>(threadIdx.x)) * 16;
    if (offset < kBytes) *reinterpret_cast<uint4*>(to + offset) = __ldg(reinterpret_cast<const uint4*>(from + offset));
  }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  ptx::fence_proxy_async();
#endif
}

/// The product with double-buffered slabs: while one stage is multiplied, the next is loaded. All warps of the block
/// call it together.
template <typename T, int kDim, int kStage = 0>
__device__ __forceinline__ void multiply_stages(Products<kDim>& c, const uint4 (&raw)[2][kDim / 32],
                                                const std::byte* rotation, std::byte* shared, int lane) {
  using Block = DenseBlock<kDim>;
  constexpr int kStages = Block::kLayout.slabs() / Block::kStageSlabs;
  if constexpr (kStage == 0) copy_slabs<Block::kStageBytes, Block::kThreads>(shared, rotation);
  __syncthreads();
  if constexpr (kStage + 1 < kStages)
    copy_slabs<Block::kStageBytes, Block::kThreads>(shared + (kStage + 1) % 2 * Block::kStageBytes,
                                                    rotation + (kStage + 1) * Block::kStageBytes);
  multiply<T, kDim, kStage * Block::kStageSlabs, Block::kStageSlabs>(
      c, raw, ptx::shared_address(shared) + kStage % 2 * Block::kStageBytes, lane);
  if constexpr (kStage + 1 < kStages)
    multiply_stages<T, kDim, kStage + 1>(c, raw, rotation, shared, lane);
  else
    __syncthreads();
}

/// Waits for the kernels before, then rotates, quantizes and stores the block's share of the tokens of one head and
/// side: every gridDim.x-th run of 16 kWarps tokens.
template <typename Side, typename T>
__device__ __forceinline__ void write_dense_side(const WriteParams& p, const WriteSide& from, bool value, int head,
                                                 int head_bytes, int side_offset, std::byte* shared) {
  constexpr int kDim = Side::kHeadDim;
  __shared__ SideTables<Side> tables;
  using Block = DenseBlock<kDim>;
  constexpr bool kHasScratch = kScratchBytes<Side> > 0;
  static_assert(!kHasScratch || (Block::kResident && Block::kRowBytes >= kScratchBytes<Side>));
  constexpr int kColumnBlockTiles = Block::kColumnBlockWidth / 8;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const std::byte* rotation = from.rotation + head * from.rotation_stride;
  // The rotation belongs to the model, no kernel writes it. So it is copied while the kernels before still run.
  if constexpr (Block::kResident) copy_slabs<Block::kStageBytes, Block::kThreads>(shared, rotation);
  if (warp == 0) tables.load(from.code, head, lane);
  wait_for_kernels_before(p.holds_next);
  if constexpr (Block::kResident) __syncthreads();
  const int clip_rank = from.clip_ranks ? from.clip_ranks[head] : 0;
  float row_scale = 1.0f;  // bfloat16 needs no scale, because it has the exponents of float
  if constexpr (std::is_same_v<T, __half>) row_scale = from.row_scales ? from.row_scales[head] : 1.0f;
  // If R is resident, warpgroups loop independently, else the whole block loops together.
  constexpr int kRunTokens = kTileTokens * (Block::kResident ? 4 : Block::kWarps);
  constexpr int kRuns = Block::kWarps * kTileTokens / kRunTokens;
  const int own_run = Block::kResident ? warp / 4 : 0, warp_in_run = Block::kResident ? warp % 4 : warp;
  const int parts = HasSegments<Side> ? p.row_parts : 1, part = static_cast<int>(blockIdx.x) & (parts - 1);
  const int stride = static_cast<int>(gridDim.x) / parts * kRuns * kRunTokens;
  const int begin = (static_cast<int>(blockIdx.x) / parts * kRuns + own_run) * kRunTokens;
  // If R is resident, there is room for half of the channels of a warp's next rows. The first half is prefetched while
  // the current rows are quantized, the second half while the first half is multiplied.
  uint4* fetched = reinterpret_cast<uint4*>(shared + Block::kStageBytes + warp * Block::kRowBytes);
  const auto fetch = [&](int first_token, int range) {
    fetch_rows<Side, T, Block::kRowRanges>(from, p, first_token, head, lane, fetched, range);
  };
  if (Block::kResident && begin < p.num_tokens) fetch(begin + warp_in_run * kTileTokens, 0);
  for (int first = begin; first < p.num_tokens; first += stride) {
    const int first_token = first + warp_in_run * kTileTokens;
    const Destinations to = load_destinations<Side>(p, first_token, part, lane);
    uint4 raw[2][kDim / 32];
    prefetch_rows<Side, T>(from, p, first_token + stride, head, lane);
    Products<kDim> c;
    if constexpr (Block::kResident) {
      constexpr int kSlabs = Block::kStageSlabs / Block::kRowRanges, kSteps = kDim / 32 / Block::kRowRanges;
      constexpr int kLast = Block::kStageSlabs - kSlabs;
      const auto load_fetched = [&](int range) {
        ptx::cp_async_wait_group<0>();
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) raw[i / kSteps][range * kSteps + i % kSteps] = fetched[i * 32 + lane];
      };
      load_fetched(0);
      if constexpr (Block::kRowRanges == 2) {
        fetch(first_token, 1);
        multiply<T, kDim, 0, kSlabs>(c, raw, ptx::shared_address(shared), lane);
        load_fetched(1);
      }
      if (!kHasScratch && first + stride < p.num_tokens) fetch(first_token + stride, 0);
      multiply<T, kDim, kLast, kSlabs>(c, raw, ptx::shared_address(shared) + kLast * Block::kLayout.slab_bytes(), lane);
    } else {
      load_rows<Side, T>(from, p, first_token, head, lane, raw);
      multiply_stages<T, kDim>(c, raw, rotation, shared, lane);
    }
    Rows<Side> rows;
    rows.clip_rank = clip_rank, rows.rotated = true, rows.row_scale = row_scale;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        rows.x[i / 2][n / 4][n % 4 * 2 + i % 2] = c[n / kColumnBlockTiles][n % kColumnBlockTiles * 4 + i];
    if (from.center) subtract_center<Side>(rows, from.center + head * kDim, lane & 3);
    auto* scratch = reinterpret_cast<std::byte*>(fetched);
    store_rows<Side>(p, from, rows, value, to, head, head_bytes, side_offset, first_token, tables, scratch, lane);
    if (kHasScratch && first + stride < p.num_tokens) fetch(first_token + stride, 0);
  }
}

/// Grid [blocks of a job, jobs]: a job is the keys or the values of a head. Jobs count the keys of all heads, then the
/// values, from `first_job` on.
template <typename K, typename V, typename T>
__global__ void __launch_bounds__(DenseBlock<K::kHeadDim>::kThreads, 1)
    dense_write_kernel(const __grid_constant__ WriteParams p, int first_job) {
  static_assert(K::kHeadDim == V::kHeadDim);
  extern __shared__ __align__(128) std::byte shared[];
  const int side_head = first_job + static_cast<int>(blockIdx.y);
  const bool value = side_head >= p.num_kv_heads;
  const WriteJob job = write_job<K, V>(p, value, side_head - (value ? p.num_kv_heads : 0));
  if constexpr (std::is_same_v<K, V>) {
    const WriteSide from = job.value ? p.v : p.k;
    write_dense_side<K, T>(p, from, job.value, job.head, job.head_bytes, job.side_offset, shared);
  } else {
    if (job.value)
      write_dense_side<V, T>(p, p.v, true, job.head, job.head_bytes, job.side_offset, shared);
    else
      write_dense_side<K, T>(p, p.k, false, job.head, job.head_bytes, job.side_offset, shared);
  }
}

}  // namespace kvq::write
