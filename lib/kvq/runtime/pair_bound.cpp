#include <kvq/codec/row_codec.h>
#include <kvq/plan/layer_pages.h>
#include <kvq/runtime/kernels/quantize_write/pair_rows.h>
#include <kvq/runtime/pair_bound.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <variant>

namespace kvq {

namespace {

constexpr int kCodes = 4, kMostPlaces = 2 * kMostPairMemory + 1;

/// What codes add to values: of the last m codes, the m before them and the next one, to the 2 m + 1 values from that
/// of the oldest of the last m codes on.
using Values = std::array<double, kMostPlaces>;

/// Adds the values of `count` codes. @param codes  the newest lowest  @param first  place of the oldest one's channel
void add_codes(const IntegerSearch& search, int codes, int count, int first, Values& values) {
  const int m = search.memory();
  const double half = 128.0 * search.unit();  // taps have 64 U for 1, of which bits count a half
  for (int i = 0; i < count; ++i) {
    const int code = codes >> 2 * (count - 1 - i) & 3;
    for (int k = 0; k <= m; ++k)
      if (const int place = first + i + k; place >= 0 && place <= 2 * m)
        for (int bit = 0; bit < 2; ++bit) {
          const double tap = search.taps()[static_cast<std::size_t>(2 * k + bit)] / half;
          values[static_cast<std::size_t>(place)] += code >> bit & 1 ? tap : -tap;
        }
  }
}

/// The largest cost of a code with those between it and the one that it drops, beside the middle of all (offset of
/// PairSearch::make_costs()).
double largest_between(const IntegerSearch& search) {
  const int m = search.memory(), states = 1 << 2 * m;
  const auto window = [&](int state) { return search.windows()[static_cast<std::size_t>(state)]; };
  int most = 0;
  for (int state = 0; m > 1 && state < states; ++state)
    most = std::max(most, std::abs(window(state) - window(state ^ (states - kCodes))) / 2 + 1);
  return most / static_cast<double>(search.unit());
}

}  // namespace

double pair_cost_bound(const IntegerSearch& search, int reference) {
  const int m = search.memory(), states = 1 << 2 * m;
  const double most_y = IntegerSearch::kLargestY / 256.0;
  double bound = 0.0;
  for (int older = 0; older < states; ++older) {
    Values before{}, of_reference{};
    add_codes(search, older, m, -m, before);
    of_reference = before;
    add_codes(search, reference, m, 0, of_reference);
    for (int state = 0; state < states; ++state) {
      Values of_state = before;
      add_codes(search, state, m, 0, of_state);
      for (int next = -1; next < kCodes; ++next) {  // -1: none
        Values own{}, oldest{};
        if (next >= 0) add_codes(search, next, 1, m, own), add_codes(search, state >> 2 * (m - 1), 1, 0, oldest);
        // |state|^2 - |reference|^2 - 2 y (state - reference), and what the next code costs by itself and with the one
        // that it drops; the costs with codes between them are added behind the comparison.
        double fixed = 0.0, linear = 0.0;
        for (std::size_t i = 0; i < kMostPlaces; ++i) {
          fixed += of_state[i] * of_state[i] - of_reference[i] * of_reference[i] + own[i] * own[i];
          fixed += 2.0 * own[i] * oldest[i];
          linear += std::abs(of_state[i] - of_reference[i] + own[i]);
        }
        bound = std::max(bound, std::abs(fixed) + 2.0 * most_y * linear);
      }
    }
  }
  return bound + largest_between(search);
}

int pair_search_memory(const TensorPlan& plan, int num_kv_heads, int dim) {
  const auto* coder = std::get_if<TrellisCoder>(&plan.coder);
  if (!coder || dim != kPairHeadDim || plan.centroids || coder->scale_type != ScaleType::fp16 ||
      (coder->rule != ScaleRule::norm && coder->rule != ScaleRule::rms))
    return 0;
  int memory = 0;
  for (int head = 0; head < num_kv_heads; ++head) {
    const std::vector<BitSegment> segments = bit_segments(plan, head, dim);
    if (segments.size() != 1 || segments[0].channels != dim || segments[0].bits != 2) return 0;
    const RowCodec codec(plan, head, dim);
    const auto* group = codec.groups().size() == 1 ? std::get_if<TrellisGroup>(&codec.groups()[0].coder) : nullptr;
    if (!group || codec.groups()[0].count != dim || !group->integer_search() || group->memory() > kMostPairMemory)
      return 0;
    // With other gains, x / (gain d) may overflow if d is the largest fp16 number.
    if (!(codec.groups()[0].gain >= 0x1p-14f && codec.groups()[0].gain <= 0x1p14f)) return 0;
    // All heads have the same trellis.
    if (head == 0) {
      const IntegerSearch& search = *group->integer_search();
      if (pair_cost_bound(search, pair_reference(group->memory())) > pair_cost_room(search.unit())) return 0;
      memory = group->memory();
    }
  }
  return memory;
}

}  // namespace kvq
