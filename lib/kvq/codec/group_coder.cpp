#include <kvq/codec/arithmetic.h>
#include <kvq/codec/codec.h>
#include <kvq/codec/group_coder.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace kvq {

namespace {

using arithmetic::kLargestGroup;

/// d = R(sqrt(E / g))
float first_scale(ScaleType type, float energy, std::size_t count) { return round_to(type, std::sqrt(energy / static_cast<float>(count))); }

/// The stored scale for decoded values v of a group whose first scale d is not 0.
float stored_scale(ScaleRule rule, ScaleType type, std::span<const float> x, std::span<const float> v, float energy, float d) {
  const float n = arithmetic::energy(v);
  if (rule == ScaleRule::rms || n == 0.0f) return d;
  if (rule == ScaleRule::norm) return round_to(type, std::sqrt(energy / n));
  return round_to(type, arithmetic::tree_dot(x, v) / n);
}

}  // namespace

CodebookGroup::CodebookGroup(std::span<const float> table, ScaleRule rule, ScaleType type)
    : table_(table.begin(), table.end()), rule_(rule), type_(type) {
  for (std::size_t i = 1; i < table_.size(); ++i) thresholds_.push_back((table_[i - 1] + table_[i]) * 0.5f);
}

float CodebookGroup::encode(std::span<const float> x, std::span<std::uint8_t> codes) const {
  KVQ_ASSERT(!x.empty() && x.size() <= kLargestGroup && codes.size() == x.size());
  const float e = arithmetic::energy(x);
  const float d = first_scale(type_, e, x.size());
  if (d == 0.0f) {
    std::fill(codes.begin(), codes.end(), static_cast<std::uint8_t>(table_.size() / 2));
    return 0.0f;
  }
  std::array<float, kLargestGroup> y;
  std::array<int, kLargestGroup> count;
  for (std::size_t j = 0; j < x.size(); ++j) y[j] = x[j] / d;
  std::fill_n(count.begin(), x.size(), 0);
  for (const float t : thresholds_)  // one threshold at a time over all channels: vectorises
    for (std::size_t j = 0; j < x.size(); ++j) count[j] += t <= y[j] ? 1 : 0;
  for (std::size_t j = 0; j < x.size(); ++j) {
    codes[j] = static_cast<std::uint8_t>(count[j]);
    y[j] = table_[codes[j]];
  }
  return stored_scale(rule_, type_, x, {y.data(), x.size()}, e, d);
}

void CodebookGroup::decode(std::span<const std::uint8_t> codes, float scale, std::span<float> out) const {
  for (std::size_t j = 0; j < codes.size(); ++j) out[j] = scale * table_[codes[j]];
}

TrellisGroup::TrellisGroup(const TrellisTaps& taps, ScaleRule rule, ScaleType type)
    : bits_(taps.bits), memory_(taps.memory), rule_(rule), type_(type) {
  for (int k = 0; k <= memory_; ++k) {
    const int terms = bits_ * (k + 1);
    std::vector<float> table(std::size_t{1} << terms);
    for (std::size_t window = 0; window < table.size(); ++window) {
      float sum = 0.0f;
      for (int i = 0; i < terms; ++i) {
        const float half = taps.theta[static_cast<std::size_t>(i)] * 0.5f;
        const float term = (window >> i) & 1u ? half : -half;
        sum = i == 0 ? term : sum + term;
      }
      table[window] = sum;
    }
    values_.push_back(std::move(table));
  }
}

void TrellisGroup::values(std::span<const std::uint8_t> codes, std::span<float> out) const {
  std::size_t window = 0;
  const std::size_t mask = values_.back().size() - 1;
  for (std::size_t j = 0; j < codes.size(); ++j) {
    window = ((window << bits_) | codes[j]) & mask;
    out[j] = values_[std::min<std::size_t>(j, static_cast<std::size_t>(memory_))][window];
  }
}

// A window of codes w = c[j] + c[j-1] 2^b + ... of m + 1 codes is a new state w mod 2^(b m) together with the oldest code
// w div 2^(b m), and it is reached from the old state w div 2^b. So the costs of all windows are one sweep, and the survivors
// the minimum over the 2^b slices of that array: both loops run over neighbouring numbers.
void TrellisGroup::viterbi(std::span<const float> y, std::span<std::uint8_t> codes) const {
  const std::size_t branches = std::size_t{1} << bits_, states = std::size_t{1} << (bits_ * memory_);
  std::array<float, 256> cost;
  std::vector<float> reached(states * branches);
  std::vector<std::uint8_t> oldest(y.size() * states);
  std::size_t alive = 1;  // states so far; before the first channel there is the empty one
  cost[0] = 0.0f;
  for (std::size_t j = 0; j < y.size(); ++j) {
    const std::vector<float>& table = values_[std::min<std::size_t>(j, static_cast<std::size_t>(memory_))];
    for (std::size_t w = 0; w < table.size(); ++w) {
      const float e = y[j] - table[w];
      reached[w] = cost[w >> bits_] + e * e;
    }
    if (alive < states) {  // one path to each state
      alive *= branches;
      std::copy_n(reached.begin(), alive, cost.begin());
      continue;
    }
    std::uint8_t* from = oldest.data() + j * states;
    std::copy_n(reached.begin(), states, cost.begin());
    for (std::size_t p = 1; p < branches; ++p) {
      const float* slice = reached.data() + p * states;
      for (std::size_t z = 0; z < states; ++z) {
        const bool better = slice[z] < cost[z];
        cost[z] = better ? slice[z] : cost[z];
        from[z] = better ? static_cast<std::uint8_t>(p) : from[z];
      }
    }
  }
  std::size_t state = static_cast<std::size_t>(std::min_element(cost.begin(), cost.begin() + static_cast<std::ptrdiff_t>(alive)) - cost.begin());
  const auto memory = static_cast<std::size_t>(memory_);
  for (std::size_t j = y.size(); j-- > 0;) {
    codes[j] = static_cast<std::uint8_t>(state & (branches - 1));
    const std::size_t dropped = j >= memory ? oldest[j * states + state] : 0;
    state = (state >> bits_) | (dropped << (bits_ * (memory_ - 1)));
  }
}

float TrellisGroup::encode(std::span<const float> x, std::span<std::uint8_t> codes) const {
  KVQ_ASSERT(!x.empty() && x.size() <= kLargestGroup && codes.size() == x.size());
  const float e = arithmetic::energy(x);
  const float d = first_scale(type_, e, x.size());
  if (d == 0.0f) {
    std::fill(codes.begin(), codes.end(), static_cast<std::uint8_t>(1 << (bits_ - 1)));
    return 0.0f;
  }
  std::array<float, kLargestGroup> y;
  for (std::size_t j = 0; j < x.size(); ++j) y[j] = x[j] / d;
  viterbi({y.data(), x.size()}, codes);
  values(codes, {y.data(), x.size()});
  return stored_scale(rule_, type_, x, {y.data(), x.size()}, e, d);
}

void TrellisGroup::decode(std::span<const std::uint8_t> codes, float scale, std::span<float> out) const {
  values(codes, out);
  for (float& value : out) value *= scale;
}

}  // namespace kvq
