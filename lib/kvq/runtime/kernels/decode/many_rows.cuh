#pragma once

#include <kvq/runtime/kernels/decode/many_rows_state.cuh>
#include <kvq/runtime/kernels/decode/stages.cuh>

/// How a consumer warp attends with 8 or 16 rows: it unpacks codes once for all of them.
///
/// Keys are multiplied by integer tensor cores, as in four_rows.cuh; the fours of rows are so chosen that lane
/// 4 g + t gets rows 2 t and 2 t + 1 of each row block, for tokens g and g + 8 of a tile. That is the order in which
/// `movmatrix` makes second operands of weights, so these need no shuffle.
///
/// Values are multiplied by fp16 tensor cores. Unpacking is one mask, because a code in the low bits of an fp16 number
/// is a subnormal number:
///
///   bits [s, s + 2) of a 16-bit half, all others 0:   code 2^s 2^-24,   exactly, as long as s + 2 <= 10
///
/// A word of codes has bytes 0 and 2 at the bottom of its halves, and bytes 1 and 3 after a shift by 8. Each weight p s
/// becomes one fp16 number or the sum of two, relative to a reference for each row. The reference follows the largest
/// weight p s, not the largest p, so that weights neither overflow nor vanish. Lane 4 g + t accumulates the rows 2 t
/// and 2 t + 1 of each row block for channels g and g + 8 of a channel block.
namespace kvq::decode {

template <typename T>
struct ManyRows : ManyRowsState<T> {
  using State = ManyRowsState<T>;
  using KSide = typename T::KSide;
  using VSide = typename T::VSide;
  using State::kBlocks, State::kTop, State::out, State::reference, State::sum, State::offsets, State::settled,
      State::follow, State::unit_of;
  using typename State::Fragment, typename State::PerRow;
  static constexpr int kTiles = 2;                        ///< attended to at once
  static constexpr int kKeyTiles = kBlocks == 1 ? 2 : 1;  ///< scored at once

  static constexpr float kMostWeight = 65504.0f;  ///< the largest fp16 number
  /// An exact token has p for a weight. The reference follows once p is above 2^(kTop + kSlack).
  static constexpr float kSlack = 4.0f;
  /// The least scale that the reference follows, as a base-2 logarithm. With smaller ones, p would be too large to be
  /// summed up.
  static constexpr float kLeastScale = -80.0f;
  /// A stage's sum of p above this makes the reference follow, too.
  static constexpr float kMostSum = 0x1p100f;

  /// Weights as operands: the parts of tokens g and g + 8 of each tile, of each group and row block.
  using Columns = unsigned[VSide::kGroups][kTiles][kBlocks][T::kWeightParts][2];

  /// Two numbers of `values`, for rows 2 t and 2 t + 1 of a row block.
  static __device__ __forceinline__ float2 of_rows(const float (&values)[T::kHeads], int block, int lane) {
    return *reinterpret_cast<const float2*>(&values[8 * block + 2 * (lane & 3)]);
  }
  /// Of a slice of values, in halves.
  static __device__ constexpr unsigned mask_of(int slice) {
    return (VSide::kBits == 2 ? 0x00030003u : 0x000F000Fu) << (slice * VSide::kBits);
  }

  /// Loads a lane's words of an operand, 8 or 16 bytes.
  template <int kWords>
  static __device__ __forceinline__ void load_lane_words(const unsigned (&from)[kWords], unsigned (&words)[kWords]) {
    if constexpr (kWords == 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      words[0] = v.x, words[1] = v.y;
    }
  }

  /// Scores of the tokens of some tiles, in multiples of the row's score scale.
  static __device__ __forceinline__ void key_scores(const unsigned char* keys, const typename T::Operand& operand,
                                                    int lane, Fragment (&scores)[kTiles]) {
#pragma unroll
    for (int first = 0; first < kTiles; first += kKeyTiles) {
      unsigned words[kKeyTiles][2 * KSide::kWords];
#pragma unroll
      for (int u = 0; u < kKeyTiles; ++u) load_words<KSide>(keys + (first + u) * KSide::side().bytes(), lane, words[u]);
#pragma unroll
      for (int group = 0; group < KSide::kGroups; ++group) {
        int products[kKeyTiles][T::kFours][4] = {};
#pragma unroll
        for (int j = group * KSide::kStepsInGroup; j < (group + 1) * KSide::kStepsInGroup; ++j) {
          const Step<KSide> step(j);
          const auto codes = [](unsigned word, int slice) { return word >> (slice * KSide::kBits) & KSide::kMask; };
          // The warp's barrier keeps the compiler from loading the queries of all steps at once, which would not fit
          // into registers.
          __syncwarp();
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) {
            unsigned query[4];
            load_lane_words(operand.fragments[j][b][lane], query);
#pragma unroll
            for (int u = 0; u < kKeyTiles; ++u) {
              const unsigned a0 = codes(words[u][step.word0], step.slice0),
                             a1 = codes(words[u][KSide::kWords + step.word0], step.slice0),
                             a2 = codes(words[u][step.word1], step.slice1),
                             a3 = codes(words[u][KSide::kWords + step.word1], step.slice1);
#pragma unroll
              for (int e = 0; e < 2; ++e)
                ptx::mma_m16n8k32_u8s8(products[u][2 * b + e], a0, a1, a2, a3, query[2 * e], query[2 * e + 1]);
            }
          }
        }
        __syncwarp();
#pragma unroll
        for (int u = 0; u < kKeyTiles; ++u) {
          const GroupParams<KSide> params(keys + (first + u) * KSide::side().bytes(), group, lane >> 2);
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) {
            const float2 sums = of_rows(operand.sums[group], b, lane);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int(&parts)[4] = products[u][2 * b + i % 2];  // high and low part of each token
              const auto product = static_cast<float>(parts[i / 2 * 2] * 256 + parts[i / 2 * 2 + 1]);
              const float of_row = i % 2 ? sums.y : sums.x, scale = params.scale[i / 2];
              float& score = scores[first + u][b][i];
              const float before = group == 0 ? 0.0f : score;
              if constexpr (KSide::kAffine)
                score = fmaf(scale, product, fmaf(params.minimum[i / 2], of_row, before));
              else
                score = fmaf(scale, product - of_row, before);
            }
          }
        }
      }
    }
  }

  /// The largest scale of all groups, of the values of tokens g and g + 8.
  struct LargestScales {
    float of[2] = {0.0f, 0.0f};
    __device__ __forceinline__ LargestScales(const unsigned char* tile, int lane) {
#pragma unroll
      for (int group = 0; group < VSide::kGroups; ++group) {
        const GroupParams<VSide> params(tile, group, lane >> 2);
        of[0] = fmaxf(of[0], params.scale[0]), of[1] = fmaxf(of[1], params.scale[1]);
      }
    }
  };

  /// Moves the references to the weights of coded tokens.
  __device__ __forceinline__ void follow_weights(const unsigned char* values, const typename T::Operand& operand,
                                                 int lane, const Fragment (&scores)[kTiles]) {
    PerRow largest;
#pragma unroll
    for (auto& rows : largest) rows[0] = rows[1] = kMinusInf;
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      const LargestScales scales(values + u * VSide::side().bytes(), lane);
      float size[2];  // of the scales, in base 2; that of a scale of 0 does not matter
#pragma unroll
      for (int i = 0; i < 2; ++i) size[i] = scales.of[i] == 0.0f ? 0.0f : fmaxf(ptx::lg2(scales.of[i]), kLeastScale);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const float2 score_scale = of_rows(operand.score_scale, b, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          largest[b][i % 2] =
              fmaxf(largest[b][i % 2], fmaf(scores[u][b][i], i % 2 ? score_scale.y : score_scale.x, size[i / 2]));
      }
    }
    follow(largest);
  }

  /// Attends to one stage of coded tokens.
  __device__ __forceinline__ void attend_coded(const DecodeKernelParams& p, const unsigned char* stage,
                                               const typename T::StageInfo& info, const typename T::Operand& operand,
                                               int lane) {
#pragma unroll 1
    for (int u = 0; u < T::kStageTiles; u += kTiles) {
      ptx::keep_branch();  // the queries are loaded each time, because they do not fit into registers
      attend_tiles(p, stage + u * KSide::side().bytes(), stage + T::kValuesAt + u * VSide::side().bytes(),
                   info.first + u * kTileTokens, info, operand, lane);
    }
  }

  /// Attends to kTiles of its tiles.
  /// @param first  position of their first token
  __device__ __forceinline__ void attend_tiles(const DecodeKernelParams& p, const unsigned char* keys,
                                               const unsigned char* values, int first,
                                               const typename T::StageInfo& info, const typename T::Operand& operand,
                                               int lane) {
    const int begin = info.begin, end = info.end, g = lane >> 2;
    const bool cut = first < begin || first + kTiles * kTileTokens > end, ragged = (info.flags & kStageRagged) != 0;
    Columns columns;
    bool follows = !settled || cut || ragged;
    for (;;) {
      Fragment scores[kTiles];
      key_scores(keys, operand, lane, scores);
      if (p.logit_softcap > 0.0f) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const float2 scale = of_rows(operand.score_scale, b, lane), center = of_rows(operand.center_scores, b, lane);
#pragma unroll
          for (auto& tile : scores)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              tile[b][i] = capped_score(p, tile[b][i], i % 2 ? scale.y : scale.x, i % 2 ? center.y : center.x);
        }
        ptx::keep_branch();
      }
      if (cut) {
#pragma unroll
        for (int u = 0; u < kTiles; ++u)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int position = first + 16 * u + 8 * i + g;
            if (position < begin || position >= end)
#pragma unroll
              for (auto& rows : scores[u]) rows[2 * i] = rows[2 * i + 1] = kMinusInf;
          }
        ptx::keep_branch();  // rarely taken
      }
      if (ragged) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const RowSight sight = operand.sight(8 * b + 2 * (lane & 3) + e);
#pragma unroll
            for (int u = 0; u < kTiles; ++u)
#pragma unroll
              for (int i = 0; i < 2; ++i)
                if (!sight.sees(first + 16 * u + 8 * i + g)) scores[u][b][2 * i + e] = kMinusInf;
          }
        ptx::keep_branch();
      }
      if (follows) {
        follow_weights(values, operand, lane, scores);
        ptx::keep_branch();
      }

      if (follows ? weigh<true>(values, operand, lane, scores, columns)
                  : weigh<false>(values, operand, lane, scores, columns))
        break;
      follows = true;
    }

    // Products of a channel block are summed from 0, then added with rounding: tensor cores truncate sums, which over
    // thousands of tokens would make `out` too small.
    unsigned words[kTiles][2 * VSide::kWords];
#pragma unroll
    for (int u = 0; u < kTiles; ++u) load_words<VSide>(values + u * VSide::side().bytes(), lane, words[u]);
#pragma unroll
    for (int block = 0; block < T::kChannelBlocks; ++block) {
      const int h = block / VSide::kPerByte, slice = block % VSide::kPerByte;
      const int group = value_step(VSide::side(), block) / VSide::kStepsInGroup;
      const unsigned mask = mask_of(slice);
      Fragment sums = {};
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        const unsigned near = words[u][2 * h], far = words[u][2 * h + 1];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
          for (const auto& part : columns[group][u][b])
            ptx::mma_m16n8k16_fp16(sums[b], near & mask, far & mask, near >> 8 & mask, far >> 8 & mask, part[0],
                                   part[1]);
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[block][b][i] += sums[b][i];
    }
  }

  /// Turns scores into weights and adds them to the sums, if they fit the references.
  /// @tparam kCareful  The references have followed. Weights that do not fit even so, because scores are too large for
  ///                   the precision of a float, are reduced. There may be hidden tokens, which have a score of -inf;
  ///                   their scales and minima are undefined, NaN included.
  /// @return           false if they do not fit; true if kCareful
  template <bool kCareful>
  __device__ __forceinline__ bool weigh(const unsigned char* values, const typename T::Operand& operand, int lane,
                                        const Fragment (&scores)[kTiles], Columns& columns) {
    PerRow sums = {};
    float more_offsets[VSide::kGroups][kBlocks][2] = {};
    __half2 largest = __floats2half2_rn(0.0f, 0.0f);
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      float most_p[2];  // of tokens g and g + 8
      if constexpr (kCareful) {
        const LargestScales scales(values + u * VSide::side().bytes(), lane);
#pragma unroll
        for (int i = 0; i < 2; ++i)  // by 2^-16 smaller, because rcp_approx() of the largest floats is 0
          most_p[i] = kMostWeight * 0x1p-16f * ptx::rcp_approx(fmaxf(scales.of[i], 0x1p-80f) * 0x1p-16f);
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const float2 score_scale = of_rows(operand.score_scale, b, lane);
        float weight[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weight[i] = ptx::ex2(fmaf(scores[u][b][i], i % 2 ? score_scale.y : score_scale.x, -reference[b][i % 2]));
          if (kCareful && weight[i] > most_p[i / 2]) weight[i] = most_p[i / 2];  // NaN stays
          sums[b][i % 2] += weight[i];
        }
#pragma unroll
        for (int group = 0; group < VSide::kGroups; ++group) {
          const GroupParams<VSide> params(values + u * VSide::side().bytes(), group, lane >> 2);
          float scaled[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const bool hidden = kCareful && scores[u][b][i] == kMinusInf;
            float& offset = more_offsets[group][b][i % 2];
            scaled[i] = hidden ? 0.0f : weight[i] * params.scale[i / 2];
            if constexpr (VSide::kAffine)
              offset = fmaf(weight[i], hidden ? 0.0f : params.minimum[i / 2], offset);
            else
              offset += scaled[i];
          }
#pragma unroll
          for (int part = 0; part < T::kWeightParts; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float &x = scaled[2 * i], &y = scaled[2 * i + 1];
              const __half2 rounded = __floats2half2_rn(x, y);
              if (part == 0) largest = __hmax2(largest, rounded);
              const float2 back = __half22float2(rounded);
              x -= back.x, y -= back.y;
              columns[group][u][b][part][i] = ptx::movmatrix_trans(reinterpret_cast<const unsigned&>(rounded));
            }
        }
      }
    }
    if constexpr (!kCareful) {
      const float2 most = __half22float2(largest);
      bool fits = fmaxf(most.x, most.y) <= kMostWeight;  // else rounded to infinity
#pragma unroll
      for (auto& rows : sums) fits = fits && !(rows[0] > kMostSum) && !(rows[1] > kMostSum);
      if (__any_sync(kAll, !fits)) return false;
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sum[b][e] += sums[b][e];
#pragma unroll
        for (int group = 0; group < VSide::kGroups; ++group) offsets[group][b][e] += more_offsets[group][b][e];
      }
    return true;
  }

  /// Attends to one stage of eight exact tokens. Queries and weights are two bfloat16 parts each.
  __device__ __forceinline__ void attend_exact(const DecodeKernelParams& p, const unsigned char* stage,
                                               const typename T::StageInfo& info, const typename T::Operand& operand,
                                               int lane) {
    const int first = info.first, begin = info.begin, end = info.end;
    const int g = lane >> 2, t = lane & 3, matrix = lane >> 3, row = lane & 7;
    const unsigned keys = ptx::shared_address(stage), values = keys + T::kExactBytes;
    float products[kBlocks][4] = {};
#pragma unroll
    for (int pair = 0; pair < T::kChannelBlocks / 2; ++pair) {
      unsigned a[4];
      ptx::ldmatrix_x4(a, keys + static_cast<unsigned>(exact_offset(T::kHeadDim, row, (4 * pair + matrix) * 8)));
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          unsigned query[2 * kBlocks];
          load_lane_words(operand.bf16_parts[2 * pair + i][part][lane], query);
#pragma unroll
          for (int b = 0; b < kBlocks; ++b)
            ptx::mma_m16n8k16_bf16(products[b], a[2 * i], 0, a[2 * i + 1], 0, query[2 * b], query[2 * b + 1]);
        }
    }
    const int position = first + g;
    const bool visible = position >= begin && position < end;
    PerRow scores;  // in base 2
    bool follows = !settled;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const float2 scale = of_rows(operand.score_scale, b, lane), ratio = of_rows(operand.exact_score_ratio, b, lane);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int of_tile = 8 * b + 2 * t + e;
        const float score_scale = e ? scale.y : scale.x;
        float score = products[b][e] * (e ? ratio.y : ratio.x);
        if (p.logit_softcap > 0.0f) score = capped_score(p, score, score_scale, operand.center_scores[of_tile]);
        const bool seen = visible && (!(info.flags & kStageRagged) || operand.sight(of_tile).sees(position));
        scores[b][e] = seen ? score * score_scale : kMinusInf;
        follows = follows || scores[b][e] - reference[b][e] > kTop + kSlack;
      }
    }
    if (__any_sync(kAll, follows)) {
      follow(scores);
      ptx::keep_branch();
    }
    // Values that no row sees may be anything. Those that only some rows see are finite, or make the others NaN, too.
    const int pair_position = first + 2 * t;
    unsigned mask = ~0u;
    if (first < begin || first + T::kExactTokens > end)
      mask = (pair_position >= begin && pair_position < end ? 0xFFFFu : 0u) |
             (pair_position + 1 >= begin && pair_position + 1 < end ? 0xFFFF0000u : 0u);
    unsigned columns[kBlocks][2];  // high parts, low parts
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float weight[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        weight[e] = ptx::ex2(scores[b][e] - reference[b][e]);
        sum[b][e] += weight[e];
        weight[e] *= 0x1p-24f;  // the unit of the sums
      }
      const unsigned high = ptx::pack_bf16(weight[0], weight[1]);
      columns[b][0] = ptx::movmatrix_trans(high);
      columns[b][1] = ptx::movmatrix_trans(
          ptx::pack_bf16(weight[0] - __uint_as_float(high << 16), weight[1] - __uint_as_float(high & 0xFFFF0000u)));
    }
#pragma unroll
    for (int pair = 0; pair < T::kChannelBlocks / 2; ++pair) {
      unsigned a[4];
      ptx::ldmatrix_x4_trans(a,
                             values + static_cast<unsigned>(exact_offset(T::kHeadDim, row, (4 * pair + matrix) * 8)));
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          float c[4] = {};
#pragma unroll
          for (const unsigned column : columns[b])
            ptx::mma_m16n8k8_bf16(c, a[2 * i] & mask, a[2 * i + 1] & mask, column);
          const float per_unit = 0x1p24f / unit_of(2 * pair + i);
#pragma unroll
          for (int j = 0; j < 4; ++j) out[2 * pair + i][b][j] = fmaf(c[j], per_unit, out[2 * pair + i][b][j]);
        }
    }
  }
};

}  // namespace kvq::decode
