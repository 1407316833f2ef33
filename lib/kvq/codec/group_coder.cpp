#include <kvq/codec/arithmetic.h>
#include <kvq/codec/codec.h>
#include <kvq/codec/group_coder.h>
#include <kvq/codec/viterbi_step.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace kvq {

namespace {

using arithmetic::kLargestGroup;
static_assert(viterbi::kMostStates == TrellisGroup::kMostStates);

/// One channel's step of a search.
struct FloatStep {
  float y;
  std::size_t states, branches;  ///< S, 2^b
  const float* values;           ///< [S 2^b]
  float* cost;                   ///< [S + kLanes]
  float* next;                   ///< [S] memory
  std::uint8_t* oldest;          ///< [S] the code that each survivor drops
};

/// A path to window w costs (y - value[w])^2 more.
KVQ_STEP void take_step(const FloatStep& s) {
  const auto wide = [&](std::size_t w, auto& to) KVQ_STEP_LAMBDA {
    viterbi::load(s.values + w, to);
    to = s.y - to;
    to *= to;
  };
  const auto narrow = [&](std::size_t w) KVQ_STEP_LAMBDA {
    const float e = s.y - s.values[w];
    return e * e;
  };
  viterbi::take(s.cost, s.branches, s.states, s.next, s.oldest, wide, narrow);
  for (std::size_t z = 0; z < s.states; ++z) s.cost[z] = s.next[z];
}

__attribute__((KVQ_UNSANITIZED)) void step_plain(const FloatStep& s) { take_step(s); }
#ifdef KVQ_X86
__attribute__((target("avx2"), KVQ_UNSANITIZED)) void step_avx2(const FloatStep& s) { take_step(s); }
#endif

auto chosen_step() {
#ifdef KVQ_X86
  static const bool wide = __builtin_cpu_supports("avx2");
  if (wide) return step_avx2;
#endif
  return step_plain;
}

/// d = R(sqrt(E / g))
float first_scale(ScaleType type, float energy, std::size_t count) {
  return round_to(type, std::sqrt(energy / static_cast<float>(count)));
}

/// The stored scale for decoded values v of a group whose first scale d is not 0.
float stored_scale(ScaleRule rule, ScaleType type, std::span<const float> x, std::span<const float> v, float energy,
                   float d) {
  const float n = arithmetic::energy(v);
  if (rule == ScaleRule::rms || n == 0.0f) return d;
  if (rule == ScaleRule::norm) return round_to(type, std::sqrt(energy / n));
  const float refit = arithmetic::tree_dot(x, v) / n;
  return std::isnan(refit) ? d : round_to(type, refit);  // inf - inf: products that overflow both ways
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
  for (std::size_t j = 0; j < x.size(); ++j) y[j] = x[j] / d;
  search({y.data(), x.size()}, codes);
  values_of(codes, {y.data(), x.size()});
  return stored_scale(rule_, type_, x, {y.data(), x.size()}, e, d);
}

void CodebookGroup::search(std::span<const float> y, std::span<std::uint8_t> codes) const {
  std::array<int, kLargestGroup> count;
  std::fill_n(count.begin(), y.size(), 0);
  for (const float t : thresholds_)  // one threshold at a time over all channels: vectorizes
    for (std::size_t j = 0; j < y.size(); ++j) count[j] += t <= y[j] ? 1 : 0;
  for (std::size_t j = 0; j < y.size(); ++j) codes[j] = static_cast<std::uint8_t>(count[j]);
}

void CodebookGroup::values_of(std::span<const std::uint8_t> codes, std::span<float> out) const {
  for (std::size_t j = 0; j < codes.size(); ++j) out[j] = table_[codes[j]];
}

void CodebookGroup::decode(std::span<const std::uint8_t> codes, float scale, std::span<float> out) const {
  for (std::size_t j = 0; j < codes.size(); ++j) out[j] = scale * table_[codes[j]];
}

TrellisGroup::TrellisGroup(const TrellisTaps& taps, ScaleRule rule, ScaleType type)
    : bits_(taps.bits),
      memory_(taps.memory),
      values_(std::size_t{1} << (taps.bits * (taps.memory + 1))),
      rule_(rule),
      type_(type) {
  KVQ_ASSERT(values_.size() >> bits_ <= kMostStates);
  if (taps.search == TrellisSearch::integer) integer_search_.emplace(taps);
  for (std::size_t window = 0; window < values_.size(); ++window)
    for (std::size_t i = 0; i < taps.theta.size(); ++i) {
      const float half = taps.theta[i] * 0.5f, term = (window >> i) & 1u ? half : -half;
      values_[window] = i == 0 ? term : values_[window] + term;
    }
}

std::vector<float> TrellisGroup::kernel_table() const {
  std::vector<float> table = values_;
  const auto add = [&](std::span<const std::int32_t> integers) {
    for (const std::int32_t integer : integers) {
      KVQ_ASSERT(integer > -(1 << 24) && integer < 1 << 24);
      table.push_back(static_cast<float>(integer));
    }
  };
  if (integer_search_) add(integer_search_->windows()), add(integer_search_->taps());
  return table;
}

void TrellisGroup::values_of(std::span<const std::uint8_t> codes, std::span<float> out) const {
  const std::size_t mask = values_.size() - 1, n = codes.size();
  std::size_t window = 0;
  for (auto j = n - static_cast<std::size_t>(memory_); j < n; ++j) window = (window << bits_) | codes[j];
  for (std::size_t j = 0; j < n; ++j) {
    window = ((window << bits_) | codes[j]) & mask;
    out[j] = values_[window];
  }
}

std::size_t TrellisGroup::seam_state(std::span<const float> y) const {
  const std::size_t states = values_.size() >> bits_, length = std::min(y.size(), kSeamLength);
  std::vector<float> cost(states + viterbi::kLanes, 0.0f), next(states);
  std::vector<std::uint8_t> oldest(2 * length * states);
  const auto run = chosen_step();
  for (std::size_t i = 0; i < 2 * length; ++i)
    run({i < length ? y[y.size() - length + i] : y[i - length], states, values_.size() / states, values_.data(),
         cost.data(), next.data(), oldest.data() + i * states});
  auto state = static_cast<std::size_t>(std::min_element(cost.data(), cost.data() + states) - cost.data());
  for (std::size_t i = 2 * length; i-- > length;)
    state = viterbi::step_back(state, oldest[i * states + state], bits_, memory_);
  return state;
}

void TrellisGroup::search(std::span<const float> y, std::span<std::uint8_t> codes) const {
  KVQ_ASSERT(y.size() >= kLeastChannels && y.size() <= kLargestGroup && codes.size() == y.size());
  if (integer_search_) return integer_search_->search(y, codes);
  const std::size_t states = values_.size() >> bits_, seam = seam_state(y);
  std::vector<float> cost(states + viterbi::kLanes, std::numeric_limits<float>::infinity()), next(states);
  cost[seam] = 0.0f;
  std::vector<std::uint8_t> oldest(y.size() * states);
  const auto run = chosen_step();
  for (std::size_t j = 0; j < y.size(); ++j)
    run({y[j], states, values_.size() / states, values_.data(), cost.data(), next.data(), oldest.data() + j * states});
  std::size_t state = seam;
  for (std::size_t j = y.size(); j-- > 0;) {
    codes[j] = static_cast<std::uint8_t>(state & ((std::size_t{1} << bits_) - 1));
    state = viterbi::step_back(state, oldest[j * states + state], bits_, memory_);
  }
}

float TrellisGroup::encode(std::span<const float> x, std::span<std::uint8_t> codes) const {
  KVQ_ASSERT(x.size() >= kLeastChannels && x.size() <= kLargestGroup && codes.size() == x.size());
  const float e = arithmetic::energy(x);
  const float d = first_scale(type_, e, x.size());
  if (d == 0.0f) {
    std::fill(codes.begin(), codes.end(), static_cast<std::uint8_t>(1 << (bits_ - 1)));
    return 0.0f;
  }
  std::array<float, kLargestGroup> y;
  for (std::size_t j = 0; j < x.size(); ++j) y[j] = x[j] / d;
  search({y.data(), x.size()}, codes);
  values_of(codes, {y.data(), x.size()});
  return stored_scale(rule_, type_, x, {y.data(), x.size()}, e, d);
}

void TrellisGroup::decode(std::span<const std::uint8_t> codes, float scale, std::span<float> out) const {
  values_of(codes, out);
  for (float& value : out) value *= scale;
}

}  // namespace kvq
