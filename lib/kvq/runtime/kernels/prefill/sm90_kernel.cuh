#pragma once

#include <kvq/device/wgmma.cuh>
#include <kvq/runtime/kernels/prefill/softmax.cuh>
#include <kvq/runtime/kernels/prefill/traits.cuh>
#include <kvq/runtime/kernels/prefill/work.cuh>

#include <type_traits>

/// Prefill attention for Hopper, warp-specialized. Two consumer warpgroups attend, 64 rows (queries) each. One thread
/// of a third warpgroup, the producer, copies keys and values of tiles from the workspace into the entries of a ring in
/// shared memory, where the tensor cores read them. Queries stay in registers, as many channels as there is room for,
/// and leave shared memory to the ring. Tiles go from the last to the first, so that partly masked tiles come first.
/// Entries are filled in the order in which they are needed: the keys of a tile, then the values of the tile after it.
///
/// The warpgroups alternate (ping-pong): while the tensor cores multiply one warpgroup's keys of a tile and values of
/// the tile before in this order, the other warpgroup computes its exponentials. A warpgroup passes the turn on as soon
/// as its products are issued.
///
///   thread 4 g + t of warp w    rows 16 w + g and 16 w + g + 8 of the warpgroup    columns 8 i + 2 t, 8 i + 2 t + 1
namespace kvq::prefill {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename T, int kCount>
__device__ __forceinline__ void product(float (&c)[kCount], ptx::u64 a, ptx::u64 b, int add) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    ptx::wgmma_m64k16_bf16(c, a, b, add);
  else
    ptx::wgmma_m64k16_fp16(c, a, b, add);
}
/// @param kTransposed  channels are the columns of the product, else its rows
template <typename T, int kTransposed, int kCount>
__device__ __forceinline__ void product(float (&c)[kCount], const unsigned* a, ptx::u64 b, int add) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    ptx::wgmma_m64k16_bf16<kTransposed>(c, a[0], a[1], a[2], a[3], b, add);
  else
    ptx::wgmma_m64k16_fp16<kTransposed>(c, a[0], a[1], a[2], a[3], b, add);
}
/// Position in the ring, with the barrier phase.
template <int kEntries>
struct Ring {
  int entry = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next() {
    if (++entry == kEntries) entry = 0, parity ^= 1;
  }
};

#endif

/// Grid: row_blocks of each work tile of the slab, one after the other.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    prefill_sm90_kernel(const __grid_constant__ PrefillParams p, const __grid_constant__ PrefillSlab slab) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using T = typename Traits::T;
  constexpr int kDim = Traits::kDim, kTile = Traits::kTile, kEntries = Traits::kEntries;
  constexpr PrefillTiles kTiles = Traits::kTiles;
  extern __shared__ __align__(1024) unsigned char memory[];
  typename Traits::Shared& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x), group = thread / 128;
  const Work work(p, slab, static_cast<int>(blockIdx.x), Traits::kRows, kTile, slab.tiles);
  if (work.refuse<T>(p, slab, static_cast<int>(blockIdx.x), kDim) || work.empty()) return;

  if (thread < kEntries) {
    ptx::mbarrier_init(ptx::shared_address(&shared.full[thread]), 1);
    ptx::mbarrier_init(ptx::shared_address(&shared.empty[thread]), 4 * Traits::kGroups);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (group == Traits::kGroups) {
    // 1. The producer: copies.
    ptx::setmaxnreg_dec<24>();
    if (thread != 128 * Traits::kGroups) return;
    const std::byte* from = p.workspace + static_cast<std::int64_t>(work.work_tile) * slab.tiles * kTiles.bytes();
    Ring<kEntries> ring;
    const auto copy = [&](int tile, int offset) {
      const unsigned barrier = ptx::shared_address(&shared.full[ring.entry]);
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[ring.entry]), ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(barrier, kTiles.side_bytes());
      ptx::cp_async_bulk(ptx::shared_address(shared.entries[ring.entry]),
                         from + static_cast<std::int64_t>(tile) * kTiles.bytes() + offset, kTiles.side_bytes(),
                         barrier);
      ring.next();
    };
    for (int tile = work.tile_end - 1; tile >= work.first_tile; --tile) {
      copy(tile, 0);
      if (tile < work.tile_end - 1) copy(tile + 1, kTiles.side_bytes());
    }
    copy(work.first_tile, kTiles.side_bytes());
  } else {
    ptx::setmaxnreg_inc<240>();
    const int lane = thread % 32, warp = thread / 32 % 4, g = lane / 4, t = lane % 4;
    const int first_row = work.first_row + group * Traits::kGroupRows;

    // 2. Queries; rows behind the last row are zeros.
    const int row = first_row + 16 * warp + g;
    unsigned queries[Traits::kHeldDim / 4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int mine = row + 8 * r;
      const auto* from =
          reinterpret_cast<const unsigned*>(static_cast<const T*>(p.q) + work.element(mine, p.q_stride, kDim)) + t;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        const unsigned two = mine < work.rows ? infinite_to_nan(from[4 * i], Pair<T>::kExponent) : 0;
        if (8 * i < Traits::kHeldDim)
          queries[2 * i + r] = two;
        else
          *reinterpret_cast<unsigned*>(shared.queries + (8 * i - Traits::kHeldDim) / 64 * Traits::kRowPanel +
                                       (mine - work.first_row) * 128 + ((i ^ mine) & 7) * 16 + 4 * t) = two;
      }
    }
    if constexpr (kDim > Traits::kHeldDim) ptx::fence_proxy_async(), ptx::bar_sync(1 + group, 128);
    const ptx::u64 q_panel =
        ptx::wgmma_panel(ptx::shared_address(shared.queries + group * Traits::kGroupRows * 128), 16);

    const ptx::u64 k_panel = ptx::wgmma_panel(ptx::shared_address(shared.entries), 16);
    const ptx::u64 v_panel = ptx::wgmma_panel(ptx::shared_address(shared.entries), kTiles.panel_bytes());
    const float score_scale = p.softmax_scale * kLog2e;
    const int2 see[2] = {work.visible(row), work.visible(row + 8)};

    RowSoftmax softmax;
    float scores[kTile / 2], out[kDim / 2], factor[2];
    unsigned weights[kTile / 4];
    const auto multiply_keys = [&](int entry) {
      const ptx::u64 k = k_panel + static_cast<ptx::u64>(entry * (kTiles.side_bytes() >> 4));
#pragma unroll
      for (int s = 0; s < kDim / 16; ++s) {
        const auto at = [s](int first, int panel_bytes) {
          return static_cast<ptx::u64>((s - first) / 4 * (panel_bytes >> 4) + s % 4 * 2);
        };
        if (16 * s < Traits::kHeldDim)
          product<T, 0>(scores, queries + 4 * s, k + at(0, kTiles.panel_bytes()), s > 0);
        else
          product<T>(scores, q_panel + at(Traits::kHeldDim / 16, Traits::kRowPanel), k + at(0, kTiles.panel_bytes()),
                     1);
      }
      ptx::wgmma_commit_group();
    };
    const auto multiply_values = [&](int entry, int add) {
      const ptx::u64 v = v_panel + static_cast<ptx::u64>(entry * (kTiles.side_bytes() >> 4));
#pragma unroll
      for (int s = 0; s < kTile / 16; ++s)
        product<T, 1>(out, weights + 4 * s, v + static_cast<ptx::u64>(s * (2048 >> 4)), s > 0 || add);
      ptx::wgmma_commit_group();
    };
    const auto cap_and_hide = [&](int tile) {
      cap_scores<kTile / 2>(p, [&](int i) -> float& { return scores[i]; });
      const int first = tile * kTile;
      if (work.whole(first, kTile)) return;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int begin = see[r].x - first - 2 * t, end = see[r].y - first - 2 * t;
#pragma unroll
        for (int i = 0; i < kTile / 4; ++i) {
          const int column = i / 2 * 8 + i % 2, at = i / 2 * 4 + 2 * r + i % 2;
          scores[at] = column >= begin && column < end ? scores[at] : kMinusInf;
        }
      }
    };
    const auto weigh = [&] {
      softmax.weigh<kTile / 4, true>([&](int r, int i) -> float& { return scores[i / 2 * 4 + 2 * r + i % 2]; },
                                     score_scale, factor);
    };
    const auto pack = [&] {
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) weights[i] = Pair<T>::pack(scores[2 * i], scores[2 * i + 1]);
    };
    Ring<kEntries> ring;
    const auto wait = [&](const Ring<kEntries>& at) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[at.entry]), at.parity);
    };
    const auto release = [&](int entry) {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[entry]));
    };
    // The turn to issue products: warpgroup 0 waits for named barrier 3, warpgroup 1 for 4.
    const auto take_turn = [&] { ptx::bar_sync(3 + group, 256); };
    const auto pass_turn = [&] { ptx::bar_arrive(4 - group, 256); };
    if (group == 1) pass_turn();

    // 3. The last tile's scores.
    wait(ring);
    take_turn();
    ptx::wgmma_fence();
    multiply_keys(ring.entry);
    pass_turn();
    ptx::wgmma_wait_group<0>();
    ptx::pin(scores);
    release(ring.entry);
    ring.next();
    cap_and_hide(work.tile_end - 1);
    weigh();
    pack();

    // 4. The scores of each tile, together with the values of the tile after it.
    int add = 0;
    for (int tile = work.tile_end - 2; tile >= work.first_tile; --tile) {
      const Ring<kEntries> keys = ring;
      ring.next();
      wait(keys);
      take_turn();
      ptx::wgmma_fence();
      multiply_keys(keys.entry);
      wait(ring);
      ptx::wgmma_fence();
      multiply_values(ring.entry, add);
      pass_turn();
      add = 1;
      ptx::wgmma_wait_group<1>();
      ptx::pin(scores);
      release(keys.entry);
      cap_and_hide(tile);
      weigh();
      ptx::wgmma_wait_group<0>();
      ptx::pin(out);
      release(ring.entry);
      ring.next();
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) out[i] *= factor[i / 2 % 2];
      pack();
    }
    if (group == 0) take_turn();  // matches the other warpgroup's last pass_turn(), so that no barrier stays incomplete
    wait(ring);
    ptx::wgmma_fence();
    multiply_values(ring.entry, add);
    ptx::wgmma_wait_group<0>();
    ptx::pin(out);

    // 5. Results.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const SoftmaxState state = softmax.across_columns(r, score_scale);
      const int mine = row + 8 * r;
      if (mine >= work.rows) continue;
      const int head = work.head * work.heads + mine % work.heads;
      const Finished finished(state, p.sink_logits ? p.sink_logits[head] * kLog2e : kMinusInf);
      unsigned* to = reinterpret_cast<unsigned*>(static_cast<T*>(p.out) + work.element(mine, p.out_stride, kDim)) + t;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i)
        to[4 * i] = Pair<T>::pack(out[4 * i + 2 * r] * finished.factor, out[4 * i + 2 * r + 1] * finished.factor);
      if (p.lse && t == 0)
        p.lse[static_cast<std::int64_t>(work.chunk.first_query + mine / work.heads) * p.num_q_heads + head] =
            finished.lse;
    }
  }
#endif
}

}  // namespace kvq::prefill
