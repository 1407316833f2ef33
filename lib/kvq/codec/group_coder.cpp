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

// A window of codes w = c[j] + c[j-1] 2^b + ... of m + 1 codes is a new state w mod 2^(b m) together with the oldest
// code w div 2^(b m), and it is reached from the old state w div 2^b. So the costs of all windows are one sweep, and
// the survivors the minimum over the 2^b slices of that array: both loops run over neighboring numbers.

/// Viterbi step of one channel y: updates the costs of all states and the code that each survivor drops.
/// reached[w] = cost[w div branches] + (y - value[w])^2.
KVQ_INLINE void step(float y, std::span<const float> values, std::span<float> cost, std::span<float> reached,
                     std::uint8_t* oldest) {
  const std::size_t all = values.size() / cost.size();
  viterbi::with_branches(all, [&](auto known) __attribute__((always_inline)) {
    const std::size_t branches = known > 0 ? known : all;
    const float* value = values.data();
    float* out = reached.data();
    for (std::size_t z = 0; z < cost.size(); ++z, value += branches, out += branches)
      for (std::size_t c = 0; c < branches; ++c) {
        const float e = y - value[c];
        out[c] = cost[z] + e * e;
      }
  });
  viterbi::keep_survivors<float>(reached, cost, oldest);
}

using Step = void (*)(float, std::span<const float>, std::span<float>, std::span<float>, std::uint8_t*);
void step_plain(float y, std::span<const float> values, std::span<float> cost, std::span<float> reached,
                std::uint8_t* oldest) {
  step(y, values, cost, reached, oldest);
}
#ifdef KVQ_X86
__attribute__((target("avx2"))) void step_avx2(float y, std::span<const float> values, std::span<float> cost,
                                               std::span<float> reached, std::uint8_t* oldest) {
  step(y, values, cost, reached, oldest);
}
#endif

Step chosen_step() {
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
  std::vector<float> cost(states, 0.0f), reached(values_.size());
  std::vector<std::uint8_t> oldest(2 * length * states);
  const Step run = chosen_step();
  for (std::size_t i = 0; i < 2 * length; ++i)
    run(i < length ? y[y.size() - length + i] : y[i - length], values_, cost, reached, oldest.data() + i * states);
  auto state = static_cast<std::size_t>(std::min_element(cost.begin(), cost.end()) - cost.begin());
  for (std::size_t i = 2 * length; i-- > length;)
    state = viterbi::step_back(state, oldest.data() + i * states, bits_, memory_);
  return state;
}

void TrellisGroup::search(std::span<const float> y, std::span<std::uint8_t> codes) const {
  KVQ_ASSERT(y.size() >= kLeastChannels && y.size() <= kLargestGroup && codes.size() == y.size());
  if (integer_search_) return integer_search_->search(y, codes);
  const std::size_t states = values_.size() >> bits_, seam = seam_state(y);
  std::vector<float> cost(states, std::numeric_limits<float>::infinity()), reached(values_.size());
  cost[seam] = 0.0f;
  std::vector<std::uint8_t> oldest(y.size() * states);
  const Step run = chosen_step();
  for (std::size_t j = 0; j < y.size(); ++j) run(y[j], values_, cost, reached, oldest.data() + j * states);
  std::size_t state = seam;
  for (std::size_t j = y.size(); j-- > 0;) {
    codes[j] = static_cast<std::uint8_t>(state & ((std::size_t{1} << bits_) - 1));
    state = viterbi::step_back(state, oldest.data() + j * states, bits_, memory_);
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
