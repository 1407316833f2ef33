#pragma once

#include <kvq/runtime/kernels/common/softmax_state.h>
#include <kvq/runtime/kernels/decode/centroids.cuh>
#include <kvq/runtime/kernels/decode/linear_rows.cuh>
#include <kvq/runtime/kernels/decode/segment_rows.cuh>
#include <kvq/runtime/kernels/decode/stages.cuh>
#include <kvq/runtime/kernels/decode/table_rows.cuh>

#include <algorithm>

/// How a consumer warp attends with up to four rows, or with eight rows to bit tiles, by integer tensor cores:
///
/// Each channel of a rotated query becomes a signed 16-bit integer, 256 hi + lo, with one scale for each row; hi and lo
/// of four rows are the eight columns of the product. Likewise each weight p s becomes an unsigned 16-bit
/// integer, relative to the largest weight of the stage for this row and group. Both integer products are exact.
///
/// Lane 4 g + t accumulates for row t, in columns 2 t (of hi) and 2 t + 1 (of lo):
///
///   keys: tokens g and g + 8 of a tile      values: channels g and g + 8 of a channel block (16 permuted channels)
///
/// Eight rows are two fours. Codes are masked or looked up once for both; all else is done for one four after the
/// other.
namespace kvq::decode {

// ---- 1. One warp's online softmax of four rows: lane 4 g + t holds row t -----------------------------------------

template <typename T>
struct FourRowsState {
  float out[T::kSumBlocks][2];  ///< of each channel block, channels g and g + 8; of linear rows, bits
  float reference;              ///< of the exponentials, in base 2: the largest score may be kSlack above
  float sum;                    ///< this lane's tokens only
  /// What the products with codes leave out. Affine: sum of p m; symmetric: sum of p s. This lane's tokens only.
  float offsets[T::VSide::kGroups];

  __device__ __forceinline__ void reset() {
    for (auto& block : out) block[0] = block[1] = 0.0f;
    for (float& offset : offsets) offset = 0.0f;
    reference = kMinusInf;
    sum = 0.0f;
  }

  /// How far, in base 2, scores may rise above the reference before the reference follows them. Floats lose no
  /// precision by that, and lanes need not agree on each stage's largest score. A larger slack would be right, too, as
  /// long as sums of 2^kSlack stay far below the largest float.
  static constexpr float kSlack = 8.0f;

  /// Moves the reference to a stage's largest score and rescales the sums, if a lane's score exceeds it by kSlack.
  /// @param stage_max    this lane's largest score, not yet multiplied by `score_scale`
  /// @param score_scale  turns `stage_max` into a base-2 score: Query::score_scale
  /// @return             the reference, to be subtracted from base-2 scores; 0 as long as there is no score
  __device__ __forceinline__ float rescale(float stage_max, float score_scale) {
    if (__any_sync(kAll, fmaf(stage_max, score_scale, -reference) > kSlack)) {  // false where both are infinite
      stage_max = fmaxf(stage_max, __shfl_xor_sync(kAll, stage_max, 4));
      stage_max = fmaxf(stage_max, __shfl_xor_sync(kAll, stage_max, 8));
      stage_max = fmaxf(stage_max, __shfl_xor_sync(kAll, stage_max, 16));
      const float larger = fmaxf(reference, stage_max * score_scale);
      const float factor = larger > reference ? ptx::ex2(reference - larger) : 1.0f;
      for (auto& block : out) block[0] *= factor, block[1] *= factor;
      for (float& offset : offsets) offset *= factor;
      sum *= factor;
      reference = larger;
    }
    return reference == kMinusInf ? 0.0f : reference;
  }
};

/// Sums of the exact tokens of bit tiles, in channels, where `out` has those of the coded ones, in bits or in another
/// order of channels. There are few exact tokens, so these sums lie in shared memory, each lane's for itself, and take
/// no registers.
template <typename T>
struct FourRowsExact {
  float2* sums;  ///< of the lane: channels g and g + 8 of channel block b at sums[32 b]; then `reference`, 0

  /// The sums of one four.
  __device__ __forceinline__ FourRowsExact of(int four) const { return {sums + four * 32 * (T::kChannelBlocks + 1)}; }
  /// Of the exponentials, when a stage was added last.
  __device__ __forceinline__ float& reference() const { return sums[32 * T::kChannelBlocks].x; }
  __device__ __forceinline__ void reset() const {
#pragma unroll
    for (int block = 0; block < T::kChannelBlocks; ++block) sums[32 * block] = make_float2(0.0f, 0.0f);
    reference() = kMinusInf;
  }
  /// Factor of the sums, once exponentials are relative to another reference.
  __device__ __forceinline__ float factor(float now) const {
    return reference() == kMinusInf ? 0.0f : ptx::ex2(reference() - now);
  }
};

/// Those of the first four.
template <typename T>
__device__ __forceinline__ FourRowsExact<T> exact_of(typename T::DecodeShared& shared, int warp, int lane) {
  return {&shared.exact_sums[warp][0][0][lane]};
}

/// Sends each lane's two words, the high and the low parts of its head's weights, to the lanes that need them as
/// columns of the second operand: column 2 t is the high part of head t, 2 t + 1 the low part. Lane 4 g + t gets column
/// g of the words of lanes with g = 2 t (`even`) and g = 2 t + 1 (`odd`).
__device__ __forceinline__ void exchange(unsigned high, unsigned low, int lane, unsigned& even, unsigned& odd) {
  const int g = lane >> 2, t = lane & 3;
  // Lanes with even g send the word for even columns first, lanes with odd g the word for odd columns, so that two
  // shuffles are enough.
  const unsigned first = g & 1 ? low : high, second = g & 1 ? high : low;
  const int head_lane = g >> 1, source = 2 * t;
  const unsigned a = __shfl_sync(kAll, first, (source + (g & 1)) * 4 + head_lane);
  const unsigned b = __shfl_sync(kAll, second, (source + 1 - (g & 1)) * 4 + head_lane);
  even = g & 1 ? b : a;
  odd = g & 1 ? a : b;
}

// ---- 2. Coded stages ---------------------------------------------------------------------------------------------

/// Codes of one slice of a word, times 1 (even slices) or 2^bits (odd ones).
template <typename Side>
__device__ __forceinline__ unsigned slice_of(unsigned word, int slice) {
  if (slice >= 2) word >>= 2 * Side::kBits;
  return word & (static_cast<unsigned>(Side::kMask) << (slice % 2 * Side::kBits));
}

/// The queries of four rows: 16-bit integers as high and low bytes, and the factors that turn
/// integer products into scores.
template <typename T>
struct FourRowsQuery {
  using Side = typename T::KSide;
  /// Keys of mixed widths read fragments from shared memory.
  static constexpr int kHeldSteps = Side::kSegments ? 1 : T::kSteps;
  unsigned fragment[kHeldSteps][2];
  float score_scale;          ///< score scale: base-2 score of an integer product of 1, never 0
  float exact_score_ratio;    ///< score of a bfloat16 product of 1, in multiples of `score_scale`
  float sums[Side::kGroups];  ///< of q over the group times 2^bits, as integers; symmetric: times half the largest code

  __device__ __forceinline__ void load(const typename T::Operand& operand, int four, int lane) {
    const int row = 4 * four + (lane & 3);
    score_scale = operand.score_scale[row], exact_score_ratio = operand.exact_score_ratio[row];
    if constexpr (!T::kExact) {
#pragma unroll
      for (int j = 0; j < kHeldSteps; ++j)
        fragment[j][0] = operand.fragments[j][four][lane][0], fragment[j][1] = operand.fragments[j][four][lane][1];
      if constexpr (!Side::kSegments) {
#pragma unroll
        for (int j = 0; j < Side::kGroups; ++j) sums[j] = operand.sums[j][row];
      }
    }
  }
};

/// Scores of a tile's tokens g and g + 8 for row t, in multiples of the query's `score_scale`.
template <typename T>
__device__ __forceinline__ void four_rows_scores(const unsigned char* tile, const FourRowsQuery<T>& query, int lane,
                                                 float& score0, float& score1) {
  using Side = typename T::KSide;
  unsigned words[2 * Side::kWords];
  load_words<Side>(tile, lane, words);
  float scores[2] = {0.0f, 0.0f};
#pragma unroll
  for (int group = 0; group < Side::kGroups; ++group) {
    int sums[2][4] = {};
    bool used[2] = {false, false};
#pragma unroll
    for (int j = group * Side::kStepsInGroup; j < (group + 1) * Side::kStepsInGroup; ++j) {
      const Step<Side> step(j);
      const bool halves_differ = step.slice0 != step.slice1;
      const unsigned a0 = slice_of<Side>(words[step.word0], step.slice0),
                     a1 = slice_of<Side>(words[Side::kWords + step.word0], step.slice0);
      unsigned a2 = slice_of<Side>(words[step.word1], step.slice1),
               a3 = slice_of<Side>(words[Side::kWords + step.word1], step.slice1);
      if (halves_differ) a2 >>= Side::kBits, a3 >>= Side::kBits;
      const int kind = halves_differ ? 0 : step.slice0 % 2;  // codes, or codes times 2^bits
      used[kind] = true;
      ptx::mma_m16n8k32_u8s8(sums[kind], a0, a1, a2, a3, query.fragment[j][0], query.fragment[j][1]);
    }
    const GroupParams<Side> params(tile, group, lane >> 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int product = 0;
      if (used[0]) product += (sums[0][2 * i] * 256 + sums[0][2 * i + 1]) << Side::kBits;
      if (used[1]) product += sums[1][2 * i] * 256 + sums[1][2 * i + 1];
      if constexpr (Side::kAffine)
        scores[i] =
            fmaf(params.scale[i], static_cast<float>(product), fmaf(params.minimum[i], query.sums[group], scores[i]));
      else
        scores[i] = fmaf(params.scale[i], static_cast<float>(product) - query.sums[group], scores[i]);
    }
  }
  score0 = scores[0], score1 = scores[1];
}

/// Scores of a stage's tokens for row t of each four, in multiples of the query's `score_scale`: token 8 j + g has
/// scores[four][j].
template <typename T>
__device__ __forceinline__ void stage_scores(const unsigned char* stage, const typename T::Operand& operand,
                                             const FourRowsQuery<T> (&queries)[T::kFours], int lane,
                                             float (&scores)[T::kFours][2 * T::kStageTiles]) {
  if constexpr (T::KSide::kSegments) {
    segment_scores<T>(stage, operand, lane, scores);
  } else {
#pragma unroll
    for (int four = 0; four < T::kFours; ++four) {
      const FourRowsQuery<T>& query = queries[four];
#pragma unroll
      for (int u = 0; u < T::kStageTiles; ++u) {
        const unsigned char* tile = stage + u * T::KSide::side().bytes();
        float &score0 = scores[four][2 * u], &score1 = scores[four][2 * u + 1];
        if constexpr (T::KSide::kLinear)
          linear_scores<T>(tile, query.fragment, query.sums[0], lane, score0, score1);
        else if constexpr (T::KSide::kTable)
          table_scores<T>(tile, query.fragment, query.sums[0], lane, score0, score1);
        else
          four_rows_scores<T>(tile, query, lane, score0, score1);
      }
    }
  }
  if constexpr (T::kKeyCentroids) add_centroid_scores<T>(stage, operand, lane, scores[0]);
}

/// Turns a stage's scores of one four into exponentials, and adds them to the state's sum.
/// @param row        of the lane, in the work tile
/// @param reference  result: what the exponentials are relative to, in base 2
/// @return           bit j: token 8 j + g is hidden from the row
template <typename T>
__device__ __forceinline__ unsigned exponentials_of(const DecodeKernelParams& p, const typename T::StageInfo& info,
                                                    const typename T::Operand& operand, int row,
                                                    const FourRowsQuery<T>& query, FourRowsState<T>& state, int lane,
                                                    float (&scores)[2 * T::kStageTiles], float& reference) {
  const int first = info.first, begin = info.begin, end = info.end, g = lane >> 2;
  if (p.logit_softcap > 0.0f) {
#pragma unroll
    for (float& score : scores) score = capped_score(p, score, query.score_scale, operand.center_scores[row]);
    ptx::keep_branch();
  }
  unsigned hidden = 0;
  if (first < begin || first + T::kStageTokens > end) {
#pragma unroll
    for (int j = 0; j < 2 * T::kStageTiles; ++j)
      if (first + 8 * j + g < begin || first + 8 * j + g >= end) hidden |= 1u << j, scores[j] = kMinusInf;
    ptx::keep_branch();  // rarely taken
  }
  if (info.flags & kStageRagged) {
    const RowSight sight = operand.sight(row);
#pragma unroll
    for (int j = 0; j < 2 * T::kStageTiles; ++j)
      if (!sight.sees(first + 8 * j + g)) hidden |= 1u << j, scores[j] = kMinusInf;
    ptx::keep_branch();
  }
  float stage_max = scores[0];
#pragma unroll
  for (int j = 1; j < 2 * T::kStageTiles; ++j) stage_max = fmaxf(stage_max, scores[j]);
  reference = state.rescale(stage_max, query.score_scale);
#pragma unroll
  for (float& score : scores) {
    score = ptx::ex2(fmaf(score, query.score_scale, -reference));
    state.sum += score;
  }
  return hidden;
}

/// Makes weights of a stage's exponentials and the scales of one group, adds the terms that products leave out to the
/// state, and cuts the weights into integers.
template <typename T>
__device__ __forceinline__ StageWeights<T> weights_of(const unsigned char* values, int group, unsigned hidden,
                                                      const float (&exponentials)[2 * T::kStageTiles],
                                                      FourRowsState<T>& state, int lane) {
  using Side = typename T::VSide;
  constexpr int kTiles = T::kStageTiles;
  constexpr float kLargest = 65534.0f;  // largest 16-bit integer, less 1 for the error of the reciprocal below
  float weights[2 * kTiles], minima[2 * kTiles], largest = 0.0f;
#pragma unroll
  for (int u = 0; u < kTiles; ++u) {
    const GroupParams<Side> params(values + u * Side::side().bytes(), group, lane >> 2);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      weights[2 * u + i] = params.scale[i] * exponentials[2 * u + i], minima[2 * u + i] = params.minimum[i];
  }
  if (__any_sync(kAll, hidden)) {  // scales and minima beyond the sequence are undefined, NaN included
#pragma unroll
    for (int j = 0; j < 2 * kTiles; ++j)
      if (hidden >> j & 1) weights[j] = minima[j] = 0.0f;
    ptx::keep_branch();
  }
#pragma unroll
  for (int j = 0; j < 2 * kTiles; ++j) {
    state.offsets[group] =
        Side::kAffine ? fmaf(exponentials[j], minima[j], state.offsets[group]) : state.offsets[group] + weights[j];
    largest = fmaxf(largest, weights[j]);
  }
  largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 4));
  largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 8));
  largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 16));
  largest = fmaxf(largest, 1e-30f);
  const float inverse = __fdividef(kLargest, largest);
  StageWeights<T> cut;
  cut.scale = largest * (1.0f / kLargest);
  // Adding 2^23 leaves 16-bit integers in the low bits of floats, which are cut into bytes. p01 and p23: the low
  // bytes of two tokens, then the high bytes. exchange() sends the high bytes of tokens g, g + 8, g + 16, g + 24 of
  // two tiles as one word, the low bytes as another. A column has tokens 2 t, 2 t + 8, 2 t + 1, 2 t + 9 of one tile,
  // the order in which a word of codes has them. If codes are looked up, a column has tokens 2 t and 2 t + 8 of two
  // tiles, and the next one tokens 2 t + 1 and 2 t + 9 (table_rows.cuh).
#pragma unroll
  for (int pair = 0; pair < kTiles / 2; ++pair) {
    unsigned x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __float_as_uint(fmaf(weights[4 * pair + i], inverse, 8388608.0f));
    const unsigned p01 = __byte_perm(x[0], x[1], 0x5140), p23 = __byte_perm(x[2], x[3], 0x5140);
    unsigned even, odd;
    exchange(__byte_perm(p01, p23, 0x7632), __byte_perm(p01, p23, 0x5410), lane, even, odd);
    cut.columns[2 * pair] = __byte_perm(even, odd, T::kTable ? 0x3120 : 0x5410);
    cut.columns[2 * pair + 1] = __byte_perm(even, odd, T::kTable ? 0x7564 : 0x7632);
  }
  return cut;
}

/// The lane's words of a stage's values in code tiles.
template <typename T>
struct StageWords {
  static constexpr int kWords = [] {
    if constexpr (T::kBitTiles)
      return 0;
    else
      return 2 * T::VSide::kWords;
  }();
  unsigned of_tile[T::kStageTiles][std::max(1, kWords)];
};

/// Adds the values of a stage's tokens in code tiles, times their weights, to sums for the channels of one group.
template <typename T>
__device__ __forceinline__ void add_code_values(const StageWords<T>& words, int group, const StageWeights<T>& weights,
                                                FourRowsState<T>& state) {
  using Side = typename T::VSide;
  const auto& columns = weights.columns;
  // Codes of a slice are only masked, not shifted, so they carry a power of 2, which `factor` takes back. If kNested,
  // the mask keeps the slices above, too, and their integer product is subtracted.
  constexpr auto masked = [](unsigned word, int slice) {
    const unsigned below = static_cast<unsigned>(slice * Side::kBits);
    return word & (T::kNested ? 0x01010101u * (0xFFu << below & 0xFFu) : Side::kMask << below);
  };
#pragma unroll
  for (int h = 0; h < T::kChannelBlocks / Side::kPerByte; ++h) {
    int above[2] = {0, 0};
#pragma unroll
    for (int slice = Side::kPerByte - 1; slice >= 0; --slice) {
      const int block = h * Side::kPerByte + slice;
      if (value_step(Side::side(), block) / Side::kStepsInGroup != group) continue;
      int sums[4] = {};
#pragma unroll
      for (int pair = 0; pair < T::kStageTiles / 2; ++pair) {
        const auto &first = words.of_tile[2 * pair], &second = words.of_tile[2 * pair + 1];
        ptx::mma_m16n8k32_u8u8(sums, masked(first[2 * h], slice), masked(first[2 * h + 1], slice),
                               masked(second[2 * h], slice), masked(second[2 * h + 1], slice), columns[2 * pair],
                               columns[2 * pair + 1]);
      }
      const float factor = weights.scale * (1.0f / (1 << (slice * Side::kBits)));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int sum = sums[2 * i] * 256 + sums[2 * i + 1];
        state.out[block][i] = fmaf(static_cast<float>(sum - above[i]), factor, state.out[block][i]);
        if (T::kNested) above[i] = sum;
      }
    }
  }
}

/// Attends to one stage of coded tokens.
template <typename T>
__device__ __forceinline__ void four_rows_coded(const DecodeKernelParams& p, const unsigned char* stage,
                                                const typename T::StageInfo& info, const typename T::Operand& operand,
                                                const FourRowsQuery<T> (&queries)[T::kFours],
                                                FourRowsState<T> (&states)[T::kFours], MassesOf<T>& masses, int lane) {
  using Side = typename T::VSide;
  constexpr int kTiles = T::kStageTiles;
  const unsigned char* values = stage + T::kValuesAt;
  float scores[T::kFours][2 * kTiles];  // then exponentials
  stage_scores<T>(stage, operand, queries, lane, scores);
  unsigned hidden[T::kFours];  // bit j: token 8 j + g
#pragma unroll
  for (int four = 0; four < T::kFours; ++four) {
    float reference;
    hidden[four] = exponentials_of<T>(p, info, operand, 4 * four + (lane & 3), queries[four], states[four], lane,
                                      scores[four], reference);
    if constexpr (T::kValueCentroids) masses.add(values, scores[four], reference, states[four].sum, lane);
  }

  [[maybe_unused]] StageWords<T> words;  // bit tiles load words where they use them
  if constexpr (!T::kBitTiles) {
#pragma unroll
    for (int u = 0; u < kTiles; ++u) load_words<Side>(values + u * Side::side().bytes(), lane, words.of_tile[u]);
  }

#pragma unroll
  for (int group = 0; group < Side::kGroups; ++group) {
    StageWeights<T> weights[T::kFours];
#pragma unroll
    for (int four = 0; four < T::kFours; ++four)
      weights[four] = weights_of<T>(values, group, hidden[four], scores[four], states[four], lane);
    if constexpr (T::kLinear)
      add_linear_values<T>(values, weights, lane, states);
    else if constexpr (T::kTable)
      add_table_values<T>(values, weights, operand.value_levels, lane, states);
    else
      add_code_values<T>(words, group, weights[0], states[0]);
  }
}

// ---- 3. Exact stages: eight tokens in bfloat16 -------------------------------------------------------------------

/// Attends with one four to one stage of exact tokens.
template <typename T>
__device__ __forceinline__ void four_rows_exact(const DecodeKernelParams& p, const unsigned char* stage,
                                                const typename T::StageInfo& info, const typename T::Operand& operand,
                                                int four, const FourRowsQuery<T>& query, FourRowsState<T>& state,
                                                const FourRowsExact<T>& exact, int lane) {
  const int first = info.first, begin = info.begin, end = info.end;
  const int g = lane >> 2, t = lane & 3, matrix = lane >> 3, row = lane & 7;
  const unsigned keys = ptx::shared_address(stage), values = keys + T::kExactBytes;
  float sums[2][4] = {};
#pragma unroll
  for (int pair = 0; pair < T::kChannelBlocks / 2; ++pair) {
    const auto &even = operand.bf16_parts[2 * pair][four][lane], &odd = operand.bf16_parts[2 * pair + 1][four][lane];
    unsigned a[4];
    ptx::ldmatrix_x4(a, keys + static_cast<unsigned>(exact_offset(T::kHeadDim, row, (4 * pair + matrix) * 8)));
    ptx::mma_m16n8k16_bf16(sums[0], a[0], 0, a[1], 0, even[0], even[1]);
    ptx::mma_m16n8k16_bf16(sums[1], a[2], 0, a[3], 0, odd[0], odd[1]);
  }
  bool visible = first + g >= begin && first + g < end;
  if (info.flags & kStageRagged) visible = visible && operand.sight(4 * four + t).sees(first + g);
  float score = ((sums[0][0] + sums[1][0]) + (sums[0][1] + sums[1][1])) * query.exact_score_ratio;
  if (p.logit_softcap > 0.0f) score = capped_score(p, score, query.score_scale, operand.center_scores[4 * four + t]);
  if (!visible) score = kMinusInf;
  const float reference = state.rescale(score, query.score_scale);
  const float weight = ptx::ex2(fmaf(score, query.score_scale, -reference));
  state.sum += weight;
  unsigned even, odd;
  exchange(part_of(weight, false), part_of(weight, true), lane, even, odd);
  const unsigned column = __byte_perm(even, odd, 0x5410);
  // Values that no row sees may be anything. Those that only some rows see are finite, or make the others NaN, too.
  float keep = 1.0f;  // of bit tiles: factor of the sums so far
  if constexpr (T::kBitTiles) keep = exact.factor(state.reference), exact.reference() = state.reference;
  const int position = first + 2 * t;
  unsigned mask = ~0u;
  if (first < begin || first + T::kExactTokens > end)
    mask = (position >= begin && position < end ? 0xFFFFu : 0u) |
           (position + 1 >= begin && position + 1 < end ? 0xFFFF0000u : 0u);
#pragma unroll
  for (int pair = 0; pair < T::kChannelBlocks / 2; ++pair) {
    unsigned a[4];
    ptx::ldmatrix_x4_trans(a, values + static_cast<unsigned>(exact_offset(T::kHeadDim, row, (4 * pair + matrix) * 8)));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float c[4] = {};
      ptx::mma_m16n8k8_bf16(c, a[2 * i] & mask, a[2 * i + 1] & mask, column);
      if constexpr (T::kBitTiles) {
        float2& sum = exact.sums[32 * (2 * pair + i)];
        sum = make_float2(fmaf(sum.x, keep, c[0] + c[1]), fmaf(sum.y, keep, c[2] + c[3]));
      } else {
        state.out[2 * pair + i][0] += c[0] + c[1];
        state.out[2 * pair + i][1] += c[2] + c[3];
      }
    }
  }
}

// ---- 4. What a consumer warp does --------------------------------------------------------------------------------

template <typename T>
struct FourRows {
  using Side = typename T::VSide;
  FourRowsQuery<T> queries[T::kFours];
  FourRowsState<T> states[T::kFours];
  MassesOf<T> masses;

  /// Begins a work tile.
  __device__ __forceinline__ void begin(const typename T::Operand& operand, int lane) {
#pragma unroll
    for (int four = 0; four < T::kFours; ++four) queries[four].load(operand, four, lane), states[four].reset();
    if constexpr (T::kValueCentroids) masses.reset();
  }
  __device__ __forceinline__ void attend_coded(const DecodeKernelParams& p, const unsigned char* stage,
                                               const typename T::StageInfo& info, const typename T::Operand& operand,
                                               int lane) {
    four_rows_coded<T>(p, stage, info, operand, queries, states, masses, lane);
  }
  __device__ __forceinline__ void attend_exact(const DecodeKernelParams& p, const unsigned char* stage,
                                               const typename T::StageInfo& info, const typename T::Operand& operand,
                                               const FourRowsExact<T>& exact, int lane) {
#pragma unroll
    for (int four = 0; four < T::kFours; ++four)
      four_rows_exact<T>(p, stage, info, operand, four, queries[four], states[four], exact.of(four), lane);
  }
  /// Makes the results of all rows NaN.
  __device__ __forceinline__ void poison() {
#pragma unroll
    for (FourRowsState<T>& state : states) state.sum = kNaN;
  }

  /// Sums over lanes, and adds the term that the integer products left out: of the minima (affine), or of the middle
  /// of the codes (symmetric).
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (FourRowsState<T>& state : states) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        state.sum += __shfl_xor_sync(kAll, state.sum, step);
#pragma unroll
        for (float& offset : state.offsets) offset += __shfl_xor_sync(kAll, offset, step);
      }
      if constexpr (T::kLinear) {
        finish_linear_values<T>(state.out, 0.5f * state.offsets[0]);
      } else if constexpr (!T::kExact && !T::kTable) {  // levels of tables are signed
#pragma unroll
        for (int block = 0; block < T::kChannelBlocks; ++block)
#pragma unroll
          for (float& value : state.out[block])
            value += (Side::kAffine ? 1.0f : -0.5f * Side::kLevels) *
                     state.offsets[value_step(Side::side(), block) / Side::kStepsInGroup];
      }
    }
  }
  /// Calls f(row of the four, permuted channel, value, which is not divided by the softmax sum) for all values of this
  /// lane.
  template <typename F>
  __device__ __forceinline__ void for_each_value(int four, int lane, F f) const {
#pragma unroll
    for (int block = 0; block < T::kSumBlocks; ++block)
#pragma unroll
      for (int i = 0; i < 2; ++i) f(lane & 3, 16 * block + 8 * i + (lane >> 2), states[four].out[block][i]);
  }
  /// Likewise for the sums of exact tokens of bit tiles, in channels.
  template <typename F>
  __device__ __forceinline__ void for_each_exact_value(const FourRowsExact<T>& exact, int four, int lane, F f) const {
    const FourRowsExact<T> of_four = exact.of(four);
    const float factor = of_four.factor(states[four].reference);
#pragma unroll
    for (int block = 0; block < T::kChannelBlocks; ++block) {
      const float2 sum = of_four.sums[32 * block];
      f(lane & 3, 16 * block + (lane >> 2), sum.x * factor), f(lane & 3, 16 * block + 8 + (lane >> 2), sum.y * factor);
    }
  }
  /// Calls f(row, state) for the rows of each lane with lane / 4 = 0, after finish().
  template <typename F>
  __device__ __forceinline__ void for_each_state(int lane, F f) const {
#pragma unroll
    for (int four = 0; four < T::kFours; ++four)
      f(4 * four + (lane & 3), SoftmaxState{states[four].reference, states[four].sum});
  }
};

}  // namespace kvq::decode
