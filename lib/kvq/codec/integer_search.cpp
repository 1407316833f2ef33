#include <kvq/codec/integer_search.h>
#include <kvq/codec/viterbi_step.h>
#include <kvq/core/error.h>

#include <algorithm>
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

/// The costs and gains of one step.
struct IntegerStep {
  std::size_t states, branches;  ///< S, 2^b
  const std::int32_t* windows;   ///< [S 2^b]
  const std::int32_t* own;       ///< what each code costs by itself at this channel: [2^b], repeated up to kLanes
  std::int32_t* cost;            ///< [S + kLanes]
  std::int32_t* next;            ///< [S + kLanes] memory
  std::uint8_t* oldest;          ///< [S] the code that each survivor drops
};

/// Costs are relative to that of state 0, so that they do not grow with the number of steps.
KVQ_STEP void take_step(const IntegerStep& s) {
  const auto wide = [&](std::size_t w, auto& to) KVQ_STEP_LAMBDA { viterbi::load(s.windows + w, to); };
  const auto narrow = [&](std::size_t w) KVQ_STEP_LAMBDA { return s.windows[w]; };
  viterbi::take(s.cost, s.branches, s.states, s.next, s.oldest, wide, narrow);
  const std::int32_t least = s.next[0] + s.own[0];
  const std::size_t mask = std::max(s.branches, viterbi::kLanes) - 1;
  viterbi::Lanes<std::int32_t>::Vector path, more;
  for (std::size_t z = 0; z < s.states; z += viterbi::kLanes) {
    viterbi::load(s.next + z, path);
    viterbi::load(s.own + (z & mask), more);
    path += more - least;
    std::memcpy(s.cost + z, &path, sizeof path);
  }
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
  }
}

std::vector<std::int32_t> IntegerSearch::gains(std::span<const float> y) const {
  const std::size_t count = y.size();
  std::vector<std::int32_t> steps(count), gains;
  for (std::size_t j = 0; j < count; ++j) steps[j] = nearest(clamped(static_cast<double>(y[j]) * 256, kLargestY));
  for (std::size_t k = 0; k < to_size(memory_); ++k) steps.push_back(steps[k]);  // behind the last, the first again
  gains.reserve(count * to_size(bits_));
  for (std::size_t j = 0; j < count; ++j)
    for (int i = 0; i < bits_; ++i) {
      std::int32_t sum = 8192;
      for (int k = 0; k <= memory_; ++k) sum += steps[j + to_size(k)] * taps_[to_size(k * bits_ + i)];
      gains.push_back(sum >> 14);
    }
  return gains;
}

void IntegerSearch::search(std::span<const float> y, std::span<std::uint8_t> codes) const {
  const std::size_t count = y.size(), branches = std::size_t{1} << bits_, states = windows_.size() / branches;
  const std::vector<std::int32_t> gain = gains(y);
  KVQ_ASSERT(states * branches == windows_.size() && states <= viterbi::kMostStates && codes.size() == count);
  const auto run_step = chosen_integers();
  std::vector<std::int32_t> cost(states + viterbi::kLanes, 0), next(cost.size()),
      own(std::max(branches, viterbi::kLanes));
  const std::size_t steps = count < to_size(kLeastOpen) ? to_size(kWarmUp) : count;
  std::vector<std::uint8_t> oldest(std::max(count, steps) * states);
  const auto take = [&](std::size_t channel, std::uint8_t* dropped) {
    for (std::size_t e = 0; e < own.size(); ++e) {
      own[e] = 0;
      for (std::size_t i = 0; i < to_size(bits_); ++i) {
        const std::int32_t x = gain[channel * to_size(bits_) + i];
        own[e] += (e >> i & 1) != 0 ? -x : x;
      }
    }
    run_step({states, branches, windows_.data(), own.data(), cost.data(), next.data(), dropped});
  };
  /// The state before step 0 of the path that is in `state` after `end` steps.
  const auto begin_of = [&](std::size_t state, std::size_t end) {
    for (std::size_t j = end; j-- > 0;) state = viterbi::step_back(state, oldest.data() + j * states, bits_, memory_);
    return state;
  };

  // 1. The first run. The survivors of its first steps are not needed.
  for (std::size_t j = 0; j < to_size(kWarmUp); ++j) take((to_size(kWarmUp) * (count - 1) + j) % count, oldest.data());
  for (std::size_t j = 0; j < steps; ++j) take(j % count, oldest.data() + j * states);
  const std::size_t seam =
      begin_of(static_cast<std::size_t>(std::min_element(cost.data(), cost.data() + states) - cost.data()), steps);
  // 2. A short group's path has to close.
  if (count < to_size(kLeastOpen)) {
    std::fill(cost.begin(), cost.end(), kFarInUnits * unit_);
    cost[seam] = 0;
    for (std::size_t j = 0; j < count; ++j) take(j, oldest.data() + j * states);
  }
  std::size_t state = seam;
  for (std::size_t j = count; j-- > 0;) {
    codes[j] = static_cast<std::uint8_t>(state & (branches - 1));
    state = viterbi::step_back(state, oldest.data() + j * states, bits_, memory_);
  }
}

}  // namespace kvq
