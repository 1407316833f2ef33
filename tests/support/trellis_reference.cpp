#include "support/trellis_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvq::test {

namespace {

float f32(double value) { return static_cast<float>(value); }
double wide(float value) { return static_cast<double>(value); }

float added(float cost, float y, float v) {
  const float e = f32(wide(y) - wide(v));
  return f32(wide(cost) + wide(f32(wide(e) * wide(e))));
}

/// The best path to each state after some channels, and the dropped codes needed to trace it back.
template <typename Cost>
struct Survivors {
  std::vector<Cost> cost;                               ///< [S]
  std::vector<std::vector<std::uint8_t>> dropped = {};  ///< by step and state: the code that the best path dropped

  /// Advances one channel. Each state keeps its cheapest path; of equally cheap paths the one with the smallest dropped
  /// code. `after` gives the cost of a path from its cost before and the window of its last m + 1 codes, whose lowest
  /// bits are the channel's own.
  template <typename After>
  void step(int bits, const After& after) {
    const std::size_t states = cost.size();
    std::vector<Cost> next(states);
    std::vector<std::uint8_t> oldest_of(states);
    for (std::size_t to = 0; to < states; ++to)
      for (std::size_t oldest = 0; oldest < std::size_t{1} << bits; ++oldest) {
        const std::size_t window = to | oldest * states;
        const Cost candidate = after(cost[window >> bits], window);
        if (oldest != 0 && !(candidate < next[to])) continue;
        next[to] = candidate;
        oldest_of[to] = static_cast<std::uint8_t>(oldest);
      }
    cost = next;
    dropped.push_back(oldest_of);
  }

  /// The smallest state of smallest cost.
  std::size_t cheapest() const {
    return static_cast<std::size_t>(std::min_element(cost.begin(), cost.end()) - cost.begin());
  }

  /// The state `count` steps before the end of the path to `state`; stores the codes of these steps in `codes`.
  std::size_t trace(int bits, std::size_t state, std::size_t count, std::vector<std::uint8_t>* codes = nullptr) const {
    for (std::size_t i = 0; i < count; ++i) {
      if (codes != nullptr)
        codes->insert(codes->begin(), static_cast<std::uint8_t>(state & ((std::size_t{1} << bits) - 1)));
      state = (state | dropped[dropped.size() - 1 - i][state] * cost.size()) >> bits;
    }
    return state;
  }
};

std::size_t num_states(const TrellisTaps& taps) { return std::size_t{1} << (taps.bits * taps.memory); }

/// Search `binary32`.
struct Binary32Search {
  explicit Binary32Search(const TrellisTaps& taps) : bits(taps.bits), states(num_states(taps)) {
    for (std::size_t window = 0; window < states << bits; ++window) {
      std::vector<std::uint8_t> codes;
      for (int k = 0; k <= taps.memory; ++k)
        codes.push_back(static_cast<std::uint8_t>((window >> (k * bits)) & ((1u << bits) - 1)));
      values.push_back(trellis_value(taps, codes));
    }
  }

  void step(float y, Survivors<float>& paths) const {
    paths.step(bits, [&](float before, std::size_t window) { return added(before, y, values[window]); });
  }

  std::size_t seam(std::span<const float> y) const {
    const std::size_t reach = std::min<std::size_t>(y.size(), 32);
    Survivors<float> paths{.cost = std::vector<float>(states, 0.0f)};
    for (std::size_t j = 0; j < reach; ++j) step(y[y.size() - reach + j], paths);
    for (std::size_t j = 0; j < reach; ++j) step(y[j], paths);
    return paths.trace(bits, paths.cheapest(), reach);
  }

  std::vector<std::uint8_t> codes(std::span<const float> y) const {
    const std::size_t first = seam(y);
    Survivors<float> paths{.cost = std::vector<float>(states, std::numeric_limits<float>::infinity())};
    paths.cost[first] = 0.0f;
    for (const float one : y) step(one, paths);
    std::vector<std::uint8_t> found;
    paths.trace(bits, first, y.size(), &found);
    return found;
  }

  int bits;
  std::size_t states;
  std::vector<float> values;  ///< [S 2^b] by window
};

/// Search `integer`.
struct IntegerSearch {
  IntegerSearch(const TrellisTaps& taps, std::span<const float> y)
      : bits(taps.bits), count(y.size()), states(num_states(taps)), costs(taps, y) {
    first_run.cost.assign(states, 0);
    const auto g = static_cast<std::int64_t>(count), n = g < 96 ? 40 : g;
    for (std::int64_t j = -40; j < n; ++j) step(static_cast<std::size_t>(((j % g) + g) % g), first_run);
    seam = first_run.trace(bits, first_run.cheapest(), static_cast<std::size_t>(n));
  }

  void step(std::size_t j, Survivors<std::int64_t>& paths) const {
    paths.step(bits, [&](std::int64_t before, std::size_t window) { return before + costs.step(j, window); });
  }

  std::vector<std::uint8_t> codes() const {
    std::vector<std::uint8_t> found;
    if (count >= 96) {
      first_run.trace(bits, seam, count, &found);
      return found;
    }
    Survivors<std::int64_t> paths{.cost = std::vector<std::int64_t>(states, 32 * costs.unit())};
    paths.cost[seam] = 0;
    for (std::size_t j = 0; j < count; ++j) step(j, paths);
    paths.trace(bits, seam, count, &found);
    return found;
  }

  int bits;
  std::size_t count, states, seam = 0;
  IntegerCosts costs;
  Survivors<std::int64_t> first_run;
};

/// Divides by a positive number, towards minus infinity.
std::int64_t floor_quotient(std::int64_t number, std::int64_t divisor) {
  return number >= 0 ? number / divisor : -((-number + divisor - 1) / divisor);
}
std::int64_t signed_by(bool bit, std::int64_t number) { return bit ? number : -number; }

}  // namespace

/// The codes c[j], c[j-1], ... c[j-m]. The last codes of the group come before the first.
std::vector<std::uint8_t> history(std::span<const std::uint8_t> codes, std::size_t j, int memory) {
  std::vector<std::uint8_t> window;
  for (std::size_t k = 0; k <= static_cast<std::size_t>(memory); ++k)
    window.push_back(codes[(j + codes.size() * (1 + k) - k) % codes.size()]);
  return window;
}

float trellis_value(const TrellisTaps& taps, std::span<const std::uint8_t> window) {
  float sum = 0.0f;
  for (std::size_t k = 0; k <= static_cast<std::size_t>(taps.memory); ++k)
    for (std::size_t i = 0; i < static_cast<std::size_t>(taps.bits); ++i) {
      const float half = f32(wide(taps.theta[k * static_cast<std::size_t>(taps.bits) + i]) * 0.5);
      const float term = ((window[k] >> i) & 1) != 0 ? half : -half;
      sum = k + i == 0 ? term : f32(wide(sum) + wide(term));
    }
  return sum;
}

float closed_cost(const TrellisTaps& taps, std::span<const float> y, std::span<const std::uint8_t> codes) {
  float cost = 0.0f;
  for (std::size_t j = 0; j < y.size(); ++j)
    cost = added(cost, y[j], trellis_value(taps, history(codes, j, taps.memory)));
  return cost;
}

IntegerCosts::IntegerCosts(const TrellisTaps& taps, std::span<const float> y)
    : bits_(static_cast<std::size_t>(taps.bits)),
      memory_(static_cast<std::size_t>(taps.memory)),
      unit_(std::vector<std::int64_t>{20, 80, 320, 1280}[std::min<std::size_t>(bits_, 4) - 1]) {
  for (const float theta : taps.theta)
    a_.push_back(std::llrint(std::clamp(wide(theta), -2.5, 2.5) * 64.0 * static_cast<double>(unit_)));
  std::vector<std::int64_t> t;
  for (const float one : y)
    t.push_back(static_cast<std::int64_t>(std::clamp(std::nearbyint(wide(one) * 256.0), -1152.0, 1152.0)));
  for (std::size_t j = 0; j < t.size(); ++j) {
    gains_.emplace_back();
    for (std::size_t i = 0; i < bits_; ++i) gains_.back().push_back(gain(t, j, i));
  }
  for (std::size_t window = 0; window < std::size_t{1} << (bits_ * (memory_ + 1)); ++window) {
    const std::size_t mask = (std::size_t{1} << bits_) - 1, code = window & mask;
    std::int64_t cost = single(code);
    for (std::size_t k = 1; k <= memory_; ++k) cost += pair(k, code, (window >> (k * bits_)) & mask);
    codes_cost_.push_back(cost);
  }
}

std::int64_t IntegerCosts::level(std::size_t k, std::size_t code) const {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < bits_; ++i) sum += signed_by((code >> i & 1) != 0, a_[k * bits_ + i]);
  return sum;
}

std::int64_t IntegerCosts::single(std::size_t code) const {
  std::int64_t sum = 0;
  for (std::size_t l = 0; l <= memory_; ++l) sum += level(l, code) * level(l, code);
  return floor_quotient(sum + 8192 * unit_, 16384 * unit_);
}

std::int64_t IntegerCosts::pair(std::size_t k, std::size_t code, std::size_t earlier) const {
  std::int64_t sum = 0;
  for (std::size_t l = 0; l + k <= memory_; ++l) sum += level(l, code) * level(l + k, earlier);
  return floor_quotient(2 * sum + 8192 * unit_, 16384 * unit_);
}

std::int64_t IntegerCosts::gain(std::span<const std::int64_t> t, std::size_t j, std::size_t i) const {
  std::int64_t sum = 0;
  for (std::size_t k = 0; k <= memory_; ++k) sum += t[(j + k) % t.size()] * a_[k * bits_ + i];
  return floor_quotient(sum + 8192, 16384);
}

std::int64_t IntegerCosts::step(std::size_t j, std::size_t window) const {
  std::int64_t cost = codes_cost_[window];
  for (std::size_t i = 0; i < bits_; ++i) cost -= signed_by((window >> i & 1) != 0, gains_[j][i]);
  return cost;
}

std::int64_t IntegerCosts::closed(std::span<const std::uint8_t> codes) const {
  std::int64_t cost = 0;
  for (std::size_t j = 0; j < codes.size(); ++j) {
    std::size_t window = 0;
    for (std::size_t k = memory_ + 1; k-- > 0;)
      window = window << bits_ | codes[(j + codes.size() * (1 + k) - k) % codes.size()];
    cost += step(j, window);
  }
  return cost;
}

std::size_t reference_seam(const TrellisTaps& taps, std::span<const float> y) {
  return taps.search == TrellisSearch::integer ? IntegerSearch(taps, y).seam : Binary32Search(taps).seam(y);
}

std::vector<std::uint8_t> reference_codes(const TrellisTaps& taps, std::span<const float> y) {
  return taps.search == TrellisSearch::integer ? IntegerSearch(taps, y).codes() : Binary32Search(taps).codes(y);
}

}  // namespace kvq::test
