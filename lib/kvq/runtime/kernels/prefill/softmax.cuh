#pragma once

#include <kvq/runtime/kernels/common/prefill_params.h>
#include <kvq/runtime/kernels/common/softmax_state.h>
#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/common/constants.cuh>
#include <kvq/runtime/kernels/common/softcap.cuh>

/// The online softmax of a product with mma or wgmma: thread 4 g + t of a warp has the rows g and g + 8, of each the
/// columns 8 i + 2 t and 8 i + 2 t + 1; four of a product's numbers for each i, two of them for each row.
namespace kvq::prefill {

/// Caps scores that are not multiplied by the softmax scale yet, if the call asks for it.
/// @param score  index of one of `kCount` scores -> float&
template <int kCount, typename Score>
__device__ __forceinline__ void cap_scores(const PrefillParams& p, Score score) {
  if (!(p.logit_softcap > 0.0f)) return;
  const float limit = __fdividef(p.logit_softcap, p.softmax_scale);
#pragma unroll
  for (int i = 0; i < kCount; ++i) score(i) = capped(score(i), limit);
  ptx::keep_branch();
}

/// The references count scores before they are scaled to base 2.
struct RowSoftmax {
  SoftmaxState rows[2];  ///< sums: of this thread's columns

  /// Turns scores into weights.
  /// @tparam kColumns   of this thread in each row
  /// @tparam kSumApart  the weights are summed apart from the sum so far, so that no add waits for its factor
  /// @param score        (row, column) -> float&
  /// @param score_scale  base-2 score of a score of 1
  /// @param factor       result: factors of the accumulated values
  template <int kColumns, bool kSumApart, typename Score>
  __device__ __forceinline__ void weigh(Score score, float score_scale, float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      SoftmaxState& row = rows[r];
      float largest = row.max;
#pragma unroll
      for (int i = 0; i < kColumns; i += 2) largest = fmaxf(largest, fmaxf(score(r, i), score(r, i + 1)));
      largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
      const float top = largest == kMinusInf ? 0.0f : largest * score_scale;
      factor[r] = ptx::ex2(fmaf(row.max, score_scale, -top));
      row.max = largest;
      float sum = kSumApart ? 0.0f : row.sum * factor[r];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        score(r, i) = ptx::ex2(fmaf(score(r, i), score_scale, -top));
        sum += score(r, i);
      }
      row.sum = kSumApart ? fmaf(row.sum, factor[r], sum) : sum;
    }
  }
  /// The state of a whole row in base 2. All lanes of a warp call it.
  __device__ __forceinline__ SoftmaxState across_columns(int r, float score_scale) const {
    float sum = rows[r].sum;
    sum += __shfl_xor_sync(kAll, sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    return {rows[r].max * score_scale, sum};
  }
};

}  // namespace kvq::prefill
