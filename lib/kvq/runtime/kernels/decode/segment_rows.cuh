#pragma once

#include <kvq/plan/segment_layout.h>
#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/common/group_params.cuh>
#include <kvq/runtime/kernels/decode/common.cuh>
#include <kvq/runtime/kernels/decode/levels.cuh>

/// What differs in four_rows.cuh if keys have mixed widths and codebook codes (SegmentSideTraits): a unit of up to 32
/// channels is a step of an integer product, of the levels of its codes and of the query's integers; a unit of up to 16
/// channels is half a step. Each lane of four cuts one plane of the unit out of the row; the four exchange bits, so
/// that each has the codes of eight channels in nibbles, and looks them up. Units of one scale are summed up as
/// integers.
namespace kvq::decode {

/// Sums of a stage's tiles, for each four rows: high and low parts of tokens g, then of tokens g + 8.
template <typename T>
using UnitSums = int[T::kStageTiles][T::kFours][4];
/// The query's integers for a unit, of each four rows.
template <typename T>
using UnitQueries = uint2[T::kFours];

/// Turns planes of 32 channels, plane t in lane 4 g + t, into codes: lane 4 g + t gets those of the channels 4 n + t in
/// nibbles n. A transposition of squares of four bits in four lanes: neighboring lanes, then pairs of lanes, exchange
/// halves of their bits.
class PlaneExchange {
 public:
  __device__ __forceinline__ explicit PlaneExchange(int lane)
      : one_(lane & 1 ? 31 : 1),
        two_(lane & 2 ? 30 : 2),
        keep_one_(lane & 1 ? 0xAAAAAAAAu : 0x55555555u),
        keep_two_(lane & 2 ? 0xCCCCCCCCu : 0x33333333u) {}
  __device__ __forceinline__ unsigned operator()(unsigned plane) const {
    const unsigned next = __shfl_xor_sync(kAll, plane, 1);
    const unsigned half = ptx::lop3_select(keep_one_, plane, __funnelshift_l(next, next, one_));
    const unsigned over = __shfl_xor_sync(kAll, half, 2);
    return ptx::lop3_select(keep_two_, half, __funnelshift_l(over, over, two_));
  }

 private:
  unsigned one_, two_;  ///< how far the other lanes' bits are rotated to the left
  unsigned keep_one_, keep_two_;
};

/// Cuts the lane's plane of a unit out of the rows of tokens g and g + 8 of a stage's tiles. Bits behind the unit's
/// channels are anything. @param place  SegmentProgram::places
template <typename T>
__device__ __forceinline__ void cut_planes(const unsigned char* stage, unsigned place,
                                           unsigned (&planes)[T::kStageTiles][2]) {
  constexpr unsigned kMask = (1u << kPlaceWordBits) - 1;
  const unsigned shift = place >> 2 * kPlaceWordBits;
#pragma unroll
  for (int u = 0; u < T::kStageTiles; ++u) {
    const unsigned char* tile = stage + u * T::KSide::side().bytes();
    const uint2 first = *reinterpret_cast<const uint2*>(tile + (place & kMask)),
                next = *reinterpret_cast<const uint2*>(tile + (place >> kPlaceWordBits & kMask));
    planes[u][0] = __funnelshift_r(first.x, next.x, shift);
    planes[u][1] = __funnelshift_r(first.y, next.y, shift);
  }
}

/// Levels of the codes in nibbles 0 to 3, then 4 to 7. @tparam kWide  codes of 4 bits, else fewer
template <bool kWide>
__device__ __forceinline__ uint2 levels_of_codes(const uint4& table, unsigned codes) {
  if constexpr (kWide)
    return eight_levels<4>(table, codes & 0x77777777u, codes >> 1 & 0x44444444u);
  else
    return eight_levels<3>(table, codes, 0);
}

/// Adds a unit of the tokens of a stage. @tparam kHalf  it has 16 channels at most: half a step, in which the planes of
/// tokens g and g + 8 are one word  @param keep  all bits if the lane has a plane, else none
template <typename T, bool kWide, bool kHalf>
__device__ __forceinline__ void add_unit(const unsigned (&planes)[T::kStageTiles][2], unsigned keep,
                                         const PlaneExchange& exchange, const uint4& table,
                                         const UnitQueries<T>& queries, UnitSums<T>& sums) {
#pragma unroll
  for (int u = 0; u < T::kStageTiles; ++u) {
    if constexpr (kHalf) {
      const unsigned both = __byte_perm(planes[u][0], planes[u][1], 0x5410) & keep;
      const uint2 levels = levels_of_codes<kWide>(table, exchange(both));
#pragma unroll
      for (int four = 0; four < T::kFours; ++four)
        ptx::mma_m16n8k16_s8s8(sums[u][four], levels.x, levels.y, queries[four].x);
    } else {
      const uint2 first = levels_of_codes<kWide>(table, exchange(planes[u][0] & keep)),
                  second = levels_of_codes<kWide>(table, exchange(planes[u][1] & keep));
#pragma unroll
      for (int four = 0; four < T::kFours; ++four)
        ptx::mma_m16n8k32_s8s8(sums[u][four], first.x, second.x, first.y, second.y, queries[four].x, queries[four].y);
    }
  }
}

/// Scores of a stage's tokens for row t of each four, in multiples of the query's `score_scale`: of tile u those of
/// tokens g and g + 8 are 2 u and 2 u + 1.
template <typename T>
__device__ __forceinline__ void segment_scores(const unsigned char* stage, const typename T::Operand& operand, int lane,
                                               float (&scores)[T::kFours][2 * T::kStageTiles]) {
  using Side = typename T::KSide;
  const SegmentProgram& program = operand.program;
#pragma unroll
  for (auto& of_four : scores)
    for (float& score : of_four) score = 0.0f;
  const PlaneExchange exchange(lane);
  UnitSums<T> sums = {};
  const int units = program.num_units;
#pragma unroll 1
  for (int unit = 0; unit < units; ++unit) {
    const unsigned place = program.places[unit][lane], keep = place & kPlaceIsPlane ? ~0u : 0u;
    unsigned planes[T::kStageTiles][2];
    cut_planes<T>(stage, place, planes);
    const SegmentUnit& of = program.units[unit];
    const uint4 table = *reinterpret_cast<const uint4*>(of.levels);
    UnitQueries<T> queries;
#pragma unroll
    for (int four = 0; four < T::kFours; ++four)
      queries[four] = *reinterpret_cast<const uint2*>(operand.fragments[unit][four][lane]);
    const bool is_half = of.channels <= kUnitChannels / 2;
    if (of.bits == kMostLevelBits) {
      if (is_half)
        add_unit<T, true, true>(planes, keep, exchange, table, queries, sums);
      else
        add_unit<T, true, false>(planes, keep, exchange, table, queries, sums);
    } else if (is_half) {
      add_unit<T, false, true>(planes, keep, exchange, table, queries, sums);
    } else {
      add_unit<T, false, false>(planes, keep, exchange, table, queries, sums);
    }
    if (!of.ends_scale) continue;
    const unsigned char* numbers = stage + Side::side().code_bytes() + 4 * (lane >> 2) * Side::kGroups + 2 * of.scale;
#pragma unroll
    for (int u = 0; u < T::kStageTiles; ++u)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned bits =
            *reinterpret_cast<const unsigned short*>(numbers + u * Side::side().bytes() + 2 * Side::kGroups * i);
        const float scale = group_param(bits, Side::kBfloat);
#pragma unroll
        for (int four = 0; four < T::kFours; ++four) {
          int(&sum)[4] = sums[u][four];
          float& score = scores[four][2 * u + i];
          score = fmaf(scale, static_cast<float>(256 * sum[2 * i] + sum[2 * i + 1]), score);
          sum[2 * i] = sum[2 * i + 1] = 0;
        }
      }
  }
}

}  // namespace kvq::decode
