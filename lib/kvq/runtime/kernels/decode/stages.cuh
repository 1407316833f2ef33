#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/device/convert.cuh>
#include <kvq/runtime/kernels/common/group_params.cuh>
#include <kvq/runtime/kernels/common/softcap.cuh>
#include <kvq/runtime/kernels/decode/common.cuh>
#include <kvq/runtime/kernels/decode/traits.cuh>

/// What consumer warps do with a stage (KV chunk), whatever the number of rows: four_rows.cuh, many_rows.cuh.
namespace kvq::decode {

/// Loads the lane's words of a tile's codes.
template <typename Side>
__device__ __forceinline__ void load_words(const unsigned char* tile_side, int lane,
                                           unsigned (&words)[2 * Side::kWords]) {
  constexpr int kChunk = chunk_bytes(Side::side()), kInChunk = kChunk / 4;
#pragma unroll
  for (int c = 0; c < 2 * Side::kWords / kInChunk; ++c) {
    const unsigned char* at = tile_side + (c * 32 + lane) * kChunk;
    if constexpr (kChunk == 16) {
      const uint4 v = *reinterpret_cast<const uint4*>(at);
      words[4 * c] = v.x, words[4 * c + 1] = v.y, words[4 * c + 2] = v.z, words[4 * c + 3] = v.w;
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(at);
      words[2 * c] = v.x, words[2 * c + 1] = v.y;
    }
  }
}

/// Weights of a stage's tokens for four rows, as 16-bit integers in columns of second operands (weights_of()).
template <typename T>
struct StageWeights {
  unsigned columns[T::kStageTiles];
  float scale;  ///< of an integer weight of 1
};

/// Words and slice of the two half steps of step j (page_layout.h, code_place).
template <typename Side>
struct Step {
  int word0, slice0, word1, slice1;
  __device__ constexpr explicit Step(int j) {
    constexpr int kPaired = Side::kWords / 2 * Side::kPerByte;
    if (j < kPaired) {
      word0 = j / Side::kPerByte * 2, word1 = word0 + 1;
      slice0 = slice1 = j % Side::kPerByte;
    } else {
      word0 = word1 = Side::kWords - 1;
      slice0 = (j - kPaired) * 2, slice1 = slice0 + 1;
    }
  }
};

/// A capped score, in multiples of `score_scale` as it came.
/// @param center_score  what keys leave out: Operand::center_scores
__device__ __forceinline__ float capped_score(const DecodeParams& p, float score, float score_scale,
                                              float center_score) {
  return __fdividef(capped(fmaf(score, score_scale, center_score), p.logit_softcap * kLog2e), score_scale);
}

}  // namespace kvq::decode
