#pragma once

#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/quantize_write/pair_gains.cuh>

#include <type_traits>
#include <utility>

/// The search in integers of packing.md (d) for pairs of rows of two-bit codes: a thread has the costs of all states of
/// its two rows in registers, in the halves of words, times four. The lowest two bits of a cost that is compared are
/// the code that its path drops; so one minimum finds the cheapest path, the first of equal ones, and its dropped code.
/// Costs are relative to that of one state before the step, pair_reference(), plus kMiddle, and fit 16 bits if
/// pair_search_memory() says so. So the halves of costs are not negative, and a sum that does not leave their range is
/// one addition of words (addend()), which the pipe of products takes while that of minima is busy.
namespace kvq::write {

template <int kMemory>
struct PairSearch {
  static constexpr int kStates = 1 << 2 * kMemory, kCodes = 4, kSteps = kWarmUp + kPairHeadDim;
  /// With 64 states there are no registers for what steps cost: they are loaded in each step.
  static constexpr bool kHolds = kMemory < 3;
  /// What the paths to some states dropped: two bits each, the first state lowest, of 16 states a word of each row. Of
  /// memory 3 there are two: of 32 states two words of each row. Of memory 1 both rows share a word, a half each.
  using Survivors = std::conditional_t<kMemory == 3, uint4, std::conditional_t<kMemory == 2, uint2, unsigned>>;
  static constexpr int kSurvivors = kMemory == 3 ? 2 : 1;

  /// What a step costs, times four, the same in both halves. last: [d, e] with the code that is dropped; its lowest
  /// bits are d. inner: [d1, d0, e] with the other codes of the state, the newest being d0; as addend().
  struct Costs {
    alignas(16) unsigned last[16], inner[kStates];
  };
  /// The costs are sums: windows[e, d0, ...] = inner[e, d0, ...] + last[e, d of the last]. All lanes call it.
  static __device__ __forceinline__ void make_costs(const float* windows, Costs& costs, int lane) {
    const auto window = [&](int e, int inner_codes, int last) {
      return static_cast<int>(__ldg(windows + e + 4 * inner_codes + kStates * last));
    };
    const auto pair_of = [](int x) { return (static_cast<unsigned>(4 * x) & 0xFFFFu) * 0x10001u; };
    // Half of what code e costs with inner codes of 0, which is the negative of what it costs with inner codes of 3.
    constexpr int kThrees = kStates / 4 - 1;
    const auto offset = [&](int e) { return kMemory == 1 ? 0 : (window(e, 0, 0) - window(e, kThrees, 0)) / 2; };
    if (lane < 16) costs.last[lane] = pair_of(window(lane % 4, 0, lane / 4) - offset(lane % 4)) + lane / 4 * 0x10001u;
    for (int i = lane; i < kStates; i += 32)
      costs.inner[i] = addend(pair_of(window(i % 4, i / 4, 0) - window(i % 4, 0, 0) + offset(i % 4)));
  }

  static constexpr unsigned kMiddle = 0x8000'8000;
  unsigned cost[kStates];  ///< of state z, at place_of(z, phase)

  __device__ __forceinline__ PairSearch() {
#pragma unroll
    for (unsigned& each : cost) each = kMiddle;
  }

  /// Two numbers with signs in halves, as one word that is added to costs: if the lower one is negative, its addition
  /// carries into the upper one, from which that carry is taken beforehand.
  static __device__ __forceinline__ unsigned addend(unsigned halves) { return halves - 2 * (halves & 0x8000u); }

  /// Codes keep their place in a register's number while they get older: the newest code takes that of the dropped one.
  /// @param age  of the code: 0 is the newest @param phase  steps before, mod kMemory
  static __device__ constexpr int stride(int age, int phase) { return 1 << 2 * ((age + kMemory - phase) % kMemory); }
  static __device__ constexpr int place_of(int state, int phase) {
    int place = 0;
    for (int age = 0; age < kMemory; ++age) place += (state >> 2 * age & 3) * stride(age, phase);
    return place;
  }

  /// One step.
  /// @param store  (number, Survivors)
  template <int kPhase, typename Held, typename Store>
  __device__ __forceinline__ void step(uint2 gain, const Held& held, Store store) {
    const unsigned reference = cost[place_of(pair_reference(kMemory), kPhase)] ^ kMiddle;
    const unsigned minus_x = __vsub2(0u, gain.x), minus_y = __vsub2(0u, gain.y);
    const unsigned own[kCodes] = {
        __vsub2(__vadd2(gain.x, gain.y), reference),
        __vsub2(__vadd2(minus_x, gain.y), reference),
        __vsub2(__vadd2(gain.x, minus_y), reference),
        __vsub2(__vadd2(minus_x, minus_y), reference),
    };
    unsigned last[16];
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const uint4 four = held.last(i);
      last[i] = __vadd2(own[0], four.x), last[i + 1] = __vadd2(own[1], four.y);
      last[i + 2] = __vadd2(own[2], four.z), last[i + 3] = __vadd2(own[3], four.w);
    }
    const unsigned minus_one = ptx::copied(~0u);
    unsigned first_last[kCodes];
#pragma unroll
    for (int e = 0; e < kCodes; ++e) first_last[e] = addend(last[e]);
    unsigned halves[kMemory == 1 ? 1 : kStates / 8] = {};  // of both rows, of 8 states
#pragma unroll
    for (int first = kStates - 4; first >= 0; first -= 4) {
      // The four states whose older codes are `first` / 4 have the predecessors with these codes, any dropped one.
      const int inner_place = place_of(first / 4, kPhase);
      unsigned from[kCodes];
#pragma unroll
      for (int d = 0; d < kCodes; ++d) from[d] = cost[inner_place + d * stride(kMemory - 1, kPhase)];
      const uint4 four = held.inner(first);
      const unsigned inner[kCodes] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = kCodes - 1; e >= 0; --e) {
        unsigned best = from[0] + first_last[e];
#pragma unroll
        for (int d = 1; d < kCodes; ++d) best = __viaddmin_u16x2(from[d], last[e + 4 * d], best);
        const unsigned dropped = best & 0x00030003u;
        halves[first / 8] = halves[first / 8] * 4 + dropped;
        const int place = inner_place + e * stride(kMemory - 1, kPhase);
        // A product, because the pipe of minima is the busier one.
        cost[place] = kMemory == 1 ? best - dropped : dropped * minus_one + best + inner[e];
      }
      const auto of_16_states = [&](int number, int row) {
        return __byte_perm(halves[2 * number], halves[2 * number + 1], row == 0 ? 0x5410 : 0x7632);
      };
      if constexpr (kMemory == 3) {
        const int n = first / 32;
        if (first % 32 == 0)
          store(n, make_uint4(of_16_states(2 * n, 0), of_16_states(2 * n + 1, 0), of_16_states(2 * n, 1),
                              of_16_states(2 * n + 1, 1)));
      } else if constexpr (kMemory == 2) {
        if (first == 0) store(0, make_uint2(of_16_states(0, 0), of_16_states(0, 1)));
      }
    }
    if constexpr (kMemory == 1) store(0, halves[0]);
  }

  /// The state with the cheapest path of one row, the first one of equal costs, behind a number of steps that kMemory
  /// divides.
  __device__ __forceinline__ int cheapest(int half) const {
    const unsigned reference = cost[pair_reference(kMemory)];
    int best = 0, least = 0;
#pragma unroll
    for (int z = 0; z < kStates; ++z) {
      const int own = static_cast<short>(__vsub2(cost[z], reference) >> 16 * half & 0xFFFFu);
      if (z == 0 || own < least) least = own, best = z;
    }
    return best;
  }
};

/// Searches one PairBlock. Grid: [blocks of a job, jobs], a warp each.
template <int kMemory>
__global__ void __launch_bounds__(32, kMemory == 3 ? 12 : 16)
    pair_search_kernel(const __grid_constant__ WriteParams p) {
  using Search = PairSearch<kMemory>;
  using Survivors = typename Search::Survivors;
  __shared__ typename Search::Costs costs;
  const int lane = static_cast<int>(threadIdx.x), job = p.pairs.first_job + static_cast<int>(blockIdx.y);
  const bool value = job >= p.num_kv_heads;
  const int head = value ? job - p.num_kv_heads : job;
  Search::make_costs(PairTables(value ? p.v.code : p.k.code, head, kMemory).windows, costs, lane);
  __syncwarp();

  std::byte* block = p.pairs.block(job, static_cast<int>(blockIdx.x));
  const auto* gains = reinterpret_cast<const uint2*>(block) + lane;
  auto* survivors = reinterpret_cast<Survivors*>(block + PairBlock::survivors()) + lane;
  // The gains of a round are loaded during the round before.
  constexpr int kRoundSteps = kMemory == 3 ? 3 : kMemory == 2 ? 4 : 8;
  static_assert(Search::kSteps % kRoundSteps == 0 && kRoundSteps % kMemory == 0 && kWarmUp < kPairHeadDim);
  const auto gain_of = [&](int step) {
    int channel = step - kWarmUp;
    channel += channel < 0 ? kPairHeadDim : channel >= kPairHeadDim ? -kPairHeadDim : 0;
    return __ldcg(gains + channel * PairBlock::kPairs);
  };
  /// The costs of steps, from shared memory each time.
  struct Loaded {
    unsigned last_at, inner_at;
    __device__ __forceinline__ static uint4 load(unsigned at) {
      uint4 four;
      ptx::ld_shared_v4(at, four.x, four.y, four.z, four.w);
      return four;
    }
    __device__ __forceinline__ uint4 last(int i) const { return load(last_at + 4 * i); }
    __device__ __forceinline__ uint4 inner(int i) const { return load(inner_at + 4 * i); }
  };
  /// From registers.
  struct Held {
    unsigned lasts[16], inners[Search::kStates];
    __device__ __forceinline__ uint4 last(int i) const {
      return make_uint4(lasts[i], lasts[i + 1], lasts[i + 2], lasts[i + 3]);
    }
    __device__ __forceinline__ uint4 inner(int i) const {
      return make_uint4(inners[i], inners[i + 1], inners[i + 2], inners[i + 3]);
    }
  };
  std::conditional_t<Search::kHolds, Held, Loaded> held;
  if constexpr (Search::kHolds) {
#pragma unroll
    for (int i = 0; i < 16; ++i) held.lasts[i] = costs.last[i];
#pragma unroll
    for (int i = 0; i < Search::kStates; ++i) held.inners[i] = costs.inner[i];
  } else {
    held.last_at = ptx::shared_address(costs.last), held.inner_at = ptx::shared_address(costs.inner);
  }

  Search search;
  uint2 next[kRoundSteps];
#pragma unroll
  for (int i = 0; i < kRoundSteps; ++i) next[i] = gain_of(i);
#pragma unroll 1
  for (int first = 0; first < Search::kSteps; first += kRoundSteps) {
    uint2 now[kRoundSteps];
#pragma unroll
    for (int i = 0; i < kRoundSteps; ++i) now[i] = next[i], next[i] = gain_of(first + kRoundSteps + i);
    const auto take = [&](auto step) {
      // Those of the warm-up are overwritten by the first channel's.
      const int channel = max(0, first + step.value - kWarmUp);
      search.template step<step.value % kMemory>(now[step.value], held, [&](int number, Survivors dropped) {
        survivors[(channel * Search::kSurvivors + number) * PairBlock::kPairs] = dropped;
      });
    };
    [&]<int... kNumbers>(std::integer_sequence<int, kNumbers...>) {
      (take(std::integral_constant<int, kNumbers>{}), ...);
    }(std::make_integer_sequence<int, kRoundSteps>{});
  }
  reinterpret_cast<unsigned*>(block + PairBlock{kMemory}.ends())[lane] =
      static_cast<unsigned>(search.cheapest(0) | search.cheapest(1) << 16);
}

}  // namespace kvq::write
