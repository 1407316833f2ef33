#include <kvq/codec/integer_search.h>
#include <kvq/codec/viterbi_step.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace kvq {

namespace {

constexpr std::size_t to_size(int number) { return static_cast<std::size_t>(number); }

/// Division that rounds to the nearest integer, halves upwards.
std::int64_t divide_rounded(std::int64_t value, std::int64_t by) {
  const std::int64_t shifted = 2 * value + by, twice = 2 * by;
  return shifted / twice - (shifted % twice < 0 ? 1 : 0);
}

/// x rounded to an integer, ties to even, without regard to the rounding mode. |x| < 2^31.
std::int32_t nearest(double x) {
  const double below = std::floor(x), rest = x - below;
  const auto low = static_cast<std::int32_t>(below);
  return low + (rest > 0.5 || (rest == 0.5 && low % 2 != 0) ? 1 : 0);
}

/// x within [-most, most]; -most for NaN.
double clamped(double x, double most) { return x > -most ? std::min(x, most) : -most; }

/// One step. Costs are times 2^b; the lowest b bits of what a window costs are the code that it drops. So the smallest
/// sum tells the cheapest path, the first of equal ones, and its dropped code. All fits 32 bits, because theta and y
/// are clamped: with b = 8 and m = 1, the largest case, a step adds less than 2^20, and costs differ by less than 2^21.
struct IntegerStep {
  std::size_t states, branches;  ///< S, 2^b
  const std::int32_t* windows;   ///< [S 2^b]
  const std::int32_t* own;       ///< what each code costs by itself at this channel: [2^b], repeated up to kLanes
  const std::int32_t* cost;      ///< [S + kLanes] before the step
  std::int32_t* next;            ///< [S + kLanes] behind it, relative to that of state 0 before it
  std::int32_t* survivors;       ///< [S] numbers whose lowest b bits are the code that each survivor drops
};

/// For S >= kLanes. @tparam kRepeats  of viterbi::load_before()
template <std::size_t kRepeats>
KVQ_STEP void take_wide(const IntegerStep& step) {
  const IntegerStep s = step;  // stores cannot change it
  const auto dropped = static_cast<std::int32_t>(s.branches - 1);
  const std::int32_t first = s.cost[0];
  const std::size_t mask = std::max(s.branches, viterbi::kLanes) - 1, windows = s.states * s.branches;
  viterbi::Lanes<std::int32_t>::Vector best, other, added;
  for (std::size_t z = 0; z < s.states; z += viterbi::kLanes) {
    viterbi::load_before<kRepeats>(s.cost, z, s.branches, best);
    viterbi::load(s.windows + z, added);
    best += added;
    for (std::size_t w = z + s.states; w < windows; w += s.states) {
      viterbi::load_before<kRepeats>(s.cost, w, s.branches, other);
      viterbi::load(s.windows + w, added);
      other += added;
      best = other < best ? other : best;
    }
    std::memcpy(s.survivors + z, &best, sizeof best);
    viterbi::load(s.own + (z & mask), added);
    best = (best & ~dropped) + (added - first);
    std::memcpy(s.next + z, &best, sizeof best);
  }
}

/// For fewer states.
KVQ_STEP void take_narrow(const IntegerStep& step) {
  const IntegerStep s = step;
  const auto dropped = static_cast<std::int32_t>(s.branches - 1);
  const int bits = std::countr_zero(s.branches);
  for (std::size_t z = 0; z < s.states; ++z) {
    std::int32_t best = s.cost[z >> bits] + s.windows[z];
    for (std::size_t w = z + s.states; w < s.states * s.branches; w += s.states)
      best = std::min(best, s.cost[w >> bits] + s.windows[w]);
    s.survivors[z] = best;
    s.next[z] = (best & ~dropped) + s.own[z & static_cast<std::size_t>(dropped)] - s.cost[0];
  }
}

KVQ_STEP void take_step(const IntegerStep& s) {
  if (s.states < viterbi::kLanes)
    take_narrow(s);
  else if (s.branches == 2)
    take_wide<2>(s);
  else if (s.branches == 4)
    take_wide<4>(s);
  else
    take_wide<viterbi::kLanes>(s);
}

__attribute__((KVQ_UNSANITIZED)) void integers_plain(const IntegerStep& s) { take_step(s); }
#ifdef KVQ_X86
__attribute__((target("avx2"), KVQ_UNSANITIZED)) void integers_avx2(const IntegerStep& s) { take_step(s); }
#endif

auto chosen_integers() {
#ifdef KVQ_X86
  static const bool wide = __builtin_cpu_supports("avx2");
  if (wide) return integers_avx2;
#endif
  return integers_plain;
}

}  // namespace

IntegerSearch::IntegerSearch(const TrellisTaps& taps)
    : bits_(taps.bits), memory_(taps.memory), unit_(20 << 2 * (std::min(taps.bits, 4) - 1)) {
  for (const float theta : taps.theta) taps_.push_back(nearest(clamped(static_cast<double>(theta), 2.5) * 64 * unit_));
  // A[k][e] of packing.md.
  const auto value = [&](int k, int e) {
    std::int64_t sum = 0;
    for (int i = 0; i < bits_; ++i) sum += (e >> i & 1 ? 1 : -1) * std::int64_t{taps_[to_size(k * bits_ + i)]};
    return sum;
  };
  const auto products = [&](int k, int e, int d) {
    std::int64_t sum = 0;
    for (int l = 0; l + k <= memory_; ++l) sum += value(l, e) * value(l + k, d);
    return sum;
  };
  const std::int64_t by = std::int64_t{16384} * unit_;
  for (std::size_t window = 0; window < std::size_t{1} << (bits_ * (memory_ + 1)); ++window) {
    const auto code = [&](int k) { return static_cast<int>(window >> (k * bits_)) & ((1 << bits_) - 1); };
    std::int64_t sum = divide_rounded(products(0, code(0), code(0)), by);
    for (int k = 1; k <= memory_; ++k) sum += divide_rounded(2 * products(k, code(0), code(k)), by);
    windows_.push_back(static_cast<std::int32_t>(sum));
    const int dropped = code(memory_);
    packed_.push_back((windows_.back() << bits_) | dropped);
  }
}

std::vector<std::int32_t> IntegerSearch::own_costs(std::span<const float> y) const {
  const std::size_t count = y.size(), branches = std::size_t{1} << bits_, lanes = std::max(branches, viterbi::kLanes);
  std::vector<std::int32_t> steps(count), own(count * lanes);
  for (std::size_t j = 0; j < count; ++j) steps[j] = nearest(clamped(static_cast<double>(y[j]) * 256, kLargestY));
  for (std::size_t k = 0; k < to_size(memory_); ++k) steps.push_back(steps[k]);  // behind the last, the first again
  for (std::size_t j = 0; j < count; ++j) {
    std::int32_t* costs = own.data() + j * lanes;
    // Code 0 costs all gains; each bit of a code takes twice its gain from that.
    for (std::size_t i = 0; i < to_size(bits_); ++i) {
      std::int32_t sum = 8192;
      for (int k = 0; k <= memory_; ++k) sum += steps[j + to_size(k)] * taps_[to_size(k * bits_) + i];
      const std::int32_t gain = (sum >> 14) * (1 << bits_);
      for (std::size_t e = 0; e < std::size_t{1} << i; ++e) {
        costs[e] += gain;
        costs[e + (std::size_t{1} << i)] = costs[e] - 2 * gain;
      }
    }
    for (std::size_t e = branches; e < lanes; ++e) costs[e] = costs[e - branches];
  }
  return own;
}

void IntegerSearch::search(std::span<const float> y, std::span<std::uint8_t> codes) const {
  const std::size_t count = y.size(), branches = std::size_t{1} << bits_, states = windows_.size() / branches;
  KVQ_ASSERT(states * branches == windows_.size() && states <= viterbi::kMostStates && codes.size() == count);
  const std::vector<std::int32_t> own = own_costs(y);
  const auto run_step = chosen_integers();
  std::vector<std::int32_t> cost(states + viterbi::kLanes, 0), next(cost.size(), 0);
  const std::size_t steps = count < to_size(kLeastOpen) ? to_size(kWarmUp) : count;
  std::vector<std::int32_t> survivors(std::max(count, steps) * states);
  const auto take = [&](std::size_t channel, std::int32_t* of_step) {
    const std::int32_t* own_of_channel = own.data() + channel * (own.size() / count);
    run_step({states, branches, packed_.data(), own_of_channel, cost.data(), next.data(), of_step});
    cost.swap(next);
  };
  const auto before = [&](std::size_t state, std::size_t step) {
    const auto dropped = static_cast<std::size_t>(survivors[step * states + state]) & (branches - 1);
    return viterbi::step_back(state, dropped, bits_, memory_);
  };
  /// The state before step 0 of the path that is in `state` after `end` steps.
  const auto begin_of = [&](std::size_t state, std::size_t end) {
    for (std::size_t j = end; j-- > 0;) state = before(state, j);
    return state;
  };

  // 1. The first run. The survivors of its first steps are not needed.
  for (std::size_t j = 0; j < to_size(kWarmUp); ++j)
    take((to_size(kWarmUp) * (count - 1) + j) % count, survivors.data());
  for (std::size_t j = 0; j < steps; ++j) take(j % count, survivors.data() + j * states);
  const std::size_t seam =
      begin_of(static_cast<std::size_t>(std::min_element(cost.data(), cost.data() + states) - cost.data()), steps);
  // 2. A short group's path has to close.
  if (count < to_size(kLeastOpen)) {
    std::fill(cost.begin(), cost.end(), kFarInUnits * unit_ << bits_);
    cost[seam] = 0;
    for (std::size_t j = 0; j < count; ++j) take(j, survivors.data() + j * states);
  }
  std::size_t state = seam;
  for (std::size_t j = count; j-- > 0;) {
    codes[j] = static_cast<std::uint8_t>(state & (branches - 1));
    state = before(state, j);
  }
}

}  // namespace kvq
