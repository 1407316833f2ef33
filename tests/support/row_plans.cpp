#include "support/row_plans.h"

#include <algorithm>
#include <cmath>

namespace kvq::test {

std::vector<float> random_table(int bits, std::uint64_t seed) {
  Random random(seed);
  const int count = 1 << bits;
  std::vector<float> table;
  for (int i = 0; i < count; ++i)
    table.push_back(static_cast<float>((2.0 * (i + 0.4 * random.uniform(-1.0, 1.0)) + 1.0 - count) * 2.5 / count));
  return table;
}

CodebookCoder codebook_coder(int bits, int group_size, ScaleRule rule, ScaleType type, std::uint64_t seed) {
  CodebookCoder coder{.bits = bits, .group_size = group_size, .rule = rule, .scale_type = type};
  coder.tables[bits] = random_table(bits, seed);
  return coder;
}

TrellisCoder trellis_coder(const std::vector<int>& widths, int group_size, ScaleRule rule, ScaleType type,
                           std::uint64_t seed, int most_state_bits) {
  TrellisCoder coder{
      .bits = *std::max_element(widths.begin(), widths.end()),
      .group_size = group_size,
      .rule = rule,
      .scale_type = type,
  };
  Random random(seed);
  for (const int bits : widths) {
    const int most = std::max(1, std::min({8, most_state_bits / bits, 16 / bits - 1, 8 / bits}));
    const int memory = random.integer(1, most);
    const bool integers = (seed + static_cast<std::uint64_t>(bits)) % 2 == 0;
    TrellisTaps taps{.bits = bits,
                     .memory = memory,
                     .search = integers ? TrellisSearch::integer : TrellisSearch::binary32,
                     .theta = {}};
    for (int i = 0; i < bits * (memory + 1); ++i)
      taps.theta.push_back(
          static_cast<float>(random.normal() * (i < bits ? std::pow(2.0, i) * 3.0 / (1 << bits) : 0.4)));
    coder.taps.push_back(taps);
  }
  return coder;
}

std::vector<TensorPlan> plain_plans(int bits, int group_size, ScaleType type) {
  std::vector<TensorPlan> plans;
  const auto add = [&](Coder coder, bool clip) {
    TensorPlan plan;
    plan.coder = std::move(coder);
    if (clip) plan.clip_ratio = {0.95};
    plans.push_back(plan);
  };
  add(UniformCoder{.bits = bits, .group_size = group_size, .scale_type = type}, true);
  add(UniformCoder{.bits = bits, .group_size = group_size, .scale_type = type, .zero = ZeroKind::integer}, true);
  add(
      UniformCoder{
          .bits = bits,
          .group_size = group_size,
          .levels = UniformLevels::symmetric,
          .rule = ScaleRule::norm,
          .scale_type = type,
      },
      false);
  add(codebook_coder(bits, group_size, ScaleRule::norm, type, 1), false);
  add(trellis_coder({bits}, group_size, ScaleRule::norm, type, 1, 4), false);
  return plans;
}

std::vector<std::uint8_t> descending_widths(Random& random, int dim) {
  std::vector<std::uint8_t> widths;
  const int kinds = random.integer(1, 9);
  std::vector<std::uint8_t> allowed;
  for (int i = 0; i < kinds; ++i) allowed.push_back(static_cast<std::uint8_t>(random.integer(0, 8)));
  for (int j = 0; j < dim; ++j) widths.push_back(allowed[static_cast<std::size_t>(random.integer(0, kinds - 1))]);
  std::sort(widths.rbegin(), widths.rend());
  return widths;
}

TensorPlan mixed_plan(const std::vector<std::uint8_t>& widths, int dim, int coder, ScaleType type, std::uint64_t seed) {
  TensorPlan plan;
  Random random(seed);
  const int largest = std::max<int>(1, widths[0]);
  if (coder == 0) {
    const ScaleRule rule = random.integer(0, 1) == 0 ? ScaleRule::norm : ScaleRule::least_squares;
    plan.coder = UniformCoder{
        .bits = largest,
        .group_size = 0,
        .levels = UniformLevels::symmetric,
        .rule = rule,
        .scale_type = type,
    };
  } else {
    const ScaleRule rule = std::vector{ScaleRule::norm, ScaleRule::rms,
                                       ScaleRule::least_squares}[static_cast<std::size_t>(random.integer(0, 2))];
    std::vector<int> kinds;
    for (int width = 1; width <= largest; ++width)
      if (std::count(widths.begin(), widths.end(), width) > 0) kinds.push_back(width);
    if (kinds.empty()) kinds.push_back(largest);
    if (coder == 1) {
      CodebookCoder book{.bits = largest, .group_size = 0, .rule = rule, .scale_type = type};
      for (const int width : kinds) book.tables[width] = random_table(width, seed + static_cast<std::uint64_t>(width));
      plan.coder = book;
    } else {
      if (kinds.size() > 1 && random.integer(0, 1) == 0)
        kinds.erase(kinds.begin() + random.integer(0, static_cast<int>(kinds.size()) - 1));  // this width gets no theta
      TrellisCoder trellis = trellis_coder(kinds, 0, rule, type, seed, 4);
      trellis.bits = largest;
      plan.coder = trellis;
    }
  }
  plan.allocation = BitAllocation{.channel_bits = widths};
  for (int j = 0; j < dim; ++j) plan.allocation->channel_order.push_back(static_cast<std::uint16_t>(j));
  return plan;
}

void add_row_scale(TensorPlan& plan, std::uint64_t seed) {
  Random random(seed);
  BitAllocation& a = *plan.allocation;
  for (int width = 1; width <= kGainWidths; ++width) {
    const bool used = std::count(a.channel_bits.begin(), a.channel_bits.end(), width) > 0;
    const float gain = random.integer(0, 3) == 0 ? std::ldexp(1.0f, random.integer(-24, 24))
                                                 : static_cast<float>(std::exp(2.0 * random.normal()));
    a.segment_gain.push_back(used ? std::clamp(gain, kLeastChannelScale, kMostChannelScale) : 1.0f);
  }
}

void add_centroids(TensorPlan& plan, int dim, int count, std::uint64_t seed, int heads) {
  plan.centroids = Centroids{
      .count = count,
      .values = gaussian(
          static_cast<std::size_t>(heads) * static_cast<std::size_t>(count) * static_cast<std::size_t>(dim), seed),
      .inertia = std::vector<double>(static_cast<std::size_t>(heads), 0.5),
  };
}

}  // namespace kvq::test
