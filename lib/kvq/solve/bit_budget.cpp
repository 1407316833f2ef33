#include <kvq/core/error.h>
#include <kvq/plan/cache_layout.h>
#include <kvq/solve/bit_budget.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <queue>

namespace kvq {

namespace {

/// A bit that a block could get. The largest gain comes first; of equal gains the lowest index, of gains 0 the
/// narrowest block.
struct Offer {
  double gain;
  int bits, index;
  bool operator<(const Offer& other) const {
    if (gain != other.gain) return gain < other.gain;
    if (gain == 0.0 && bits != other.bits) return bits > other.bits;
    return index > other.index;
  }
};

double gain_of(double score, int bits, const RateLaw& law) {
  return score * (law[static_cast<std::size_t>(bits)] - law[static_cast<std::size_t>(bits) + 1]);
}

}  // namespace

const RateLaw& paper_law() {
  static const RateLaw law = [] {
    RateLaw values;
    for (int bits = 0; bits <= 8; ++bits) values[static_cast<std::size_t>(bits)] = std::ldexp(1.0, -2 * bits);
    return values;
  }();
  return law;
}

int total_bits(double mean_bits, int blocks) { return static_cast<int>(std::floor(mean_bits * blocks + 1e-9)); }

std::vector<std::uint8_t> greedy_allocation(std::span<const double> scores, int budget, int min_bits, int max_bits,
                                            const RateLaw& law) {
  const auto blocks = static_cast<int>(scores.size());
  if (budget < blocks * min_bits || budget > blocks * max_bits)
    throw Error{ErrorKind::usage,
                fmt::format("bit budget: expected {} to {} bits for {} blocks of {} to {} bits, found {}",
                            blocks * min_bits, blocks * max_bits, blocks, min_bits, max_bits, budget)};
  std::vector<std::uint8_t> bits(scores.size(), static_cast<std::uint8_t>(min_bits));
  std::vector<Offer> offers;
  for (int i = 0; i < blocks && min_bits < max_bits; ++i)
    offers.push_back({gain_of(scores[static_cast<std::size_t>(i)], min_bits, law), min_bits, i});
  std::priority_queue<Offer> heap(std::less<Offer>{}, std::move(offers));
  for (int left = budget - blocks * min_bits; left > 0; --left) {
    const Offer best = heap.top();
    heap.pop();
    const auto i = static_cast<std::size_t>(best.index);
    ++bits[i];
    if (bits[i] < max_bits) heap.push({gain_of(scores[i], bits[i], law), bits[i], best.index});
  }
  return bits;
}

double allocation_objective(std::span<const double> scores, std::span<const std::uint8_t> bits, const RateLaw& law) {
  double total = 0.0;
  for (std::size_t i = 0; i < scores.size(); ++i) total += scores[i] * law[bits[i]];
  return total;
}

namespace {

/// Dynamic program over the blocks in order of falling score. The bytes depend only on how many blocks have each width,
/// so a larger score never gets a smaller width: each width takes consecutive blocks, the widest first.
class ByteProgram {
 public:
  ByteProgram(std::vector<double> sorted, const RowBudget& budget, const RateLaw& law)
      : budget_(budget), law_(law), blocks_(sorted.size()), prefix_(sorted.size() + 1, 0.0) {
    std::partial_sum(sorted.begin(), sorted.end(), prefix_.begin() + 1);
    for (const int width : {8, 4, 3, 2, 1, 0})
      if (width >= budget.min_bits && width <= budget.max_bits) widths_.push_back(width);
    // Scales and index may need alignment. The offset of the scales is rounded up only if the bytes of codes are odd,
    // so an allocation that fits without alignment also fits with alignment. The program therefore counts bytes of
    // codes, rounded up, and of scales.
    const int rest = budget.row_bytes - budget.index_bytes - (budget.row_scale ? budget.scale_bytes : 0);
    room_ = static_cast<std::size_t>(std::max(0, rest - rest % budget.scale_bytes));
  }

  /// Counts of blocks at each of widths(), or empty if nothing fits.
  std::vector<int> solve() {
    const std::size_t cells = (blocks_ + 1) * (room_ + 1);
    constexpr double kNever = std::numeric_limits<double>::infinity();
    std::vector<std::vector<int>> taken(widths_.size(), std::vector<int>(cells, -1));
    std::vector<double> cost(cells, kNever);
    cost[cell(0, 0)] = 0.0;
    for (std::size_t w = 0; w < widths_.size(); ++w) {
      std::vector<double> next(cells, kNever);
      for (std::size_t done = 0; done <= blocks_; ++done)
        for (std::size_t used = 0; used <= room_; ++used) {
          if (cost[cell(done, used)] == kNever) continue;
          extend(w, done, used, cost[cell(done, used)], next, taken[w]);
        }
      cost = std::move(next);
    }
    return trace(cost, taken);
  }
  const std::vector<int>& widths() const { return widths_; }

 private:
  std::size_t cell(std::size_t done, std::size_t used) const { return done * (room_ + 1) + used; }

  std::size_t bytes_of(int width, std::size_t count) const {
    if (width == 0 || count == 0) return 0;
    const std::size_t channels = count * static_cast<std::size_t>(budget_.channels_per_block);
    return (channels * static_cast<std::size_t>(stored_bits(width)) + 7) / 8 +
           static_cast<std::size_t>(budget_.row_scale ? 0 : budget_.scale_bytes);
  }

  void extend(std::size_t w, std::size_t done, std::size_t used, double cost, std::vector<double>& next,
              std::vector<int>& taken) const {
    for (std::size_t count = 0; done + count <= blocks_; ++count) {
      const std::size_t bytes = used + bytes_of(widths_[w], count);
      if (bytes > room_) break;
      const double total = cost + (prefix_[done + count] - prefix_[done]) * law_[static_cast<std::size_t>(widths_[w])];
      const std::size_t target = cell(done + count, bytes);
      if (!(total < next[target])) continue;
      next[target] = total;
      taken[target] = static_cast<int>(count);
    }
  }

  std::vector<int> trace(const std::vector<double>& cost, const std::vector<std::vector<int>>& taken) const {
    std::size_t best = cell(blocks_, 0);
    for (std::size_t used = 0; used <= room_; ++used)
      if (cost[cell(blocks_, used)] < cost[best]) best = cell(blocks_, used);
    if (std::isinf(cost[best])) return {};
    std::vector<int> counts(widths_.size(), 0);
    std::size_t done = blocks_, used = best - cell(blocks_, 0);
    for (std::size_t w = widths_.size(); w-- > 0;) {
      counts[w] = taken[w][cell(done, used)];
      done -= static_cast<std::size_t>(counts[w]);
      used -= bytes_of(widths_[w], static_cast<std::size_t>(counts[w]));
    }
    return counts;
  }

  RowBudget budget_;
  RateLaw law_;
  std::size_t blocks_, room_ = 0;
  std::vector<double> prefix_;
  std::vector<int> widths_;
};

}  // namespace

std::vector<std::uint8_t> byte_allocation(std::span<const double> scores, const RowBudget& budget, const RateLaw& law) {
  std::vector<std::size_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
  std::vector<double> sorted;
  sorted.reserve(order.size());
  for (const std::size_t i : order) sorted.push_back(scores[i]);
  ByteProgram program(std::move(sorted), budget, law);
  const std::vector<int> counts = program.solve();
  if (counts.empty() || budget.row_bytes < budget.index_bytes) {
    const int channels = static_cast<int>(scores.size()) * budget.channels_per_block;
    const int codes = (channels * stored_bits(budget.min_bits) + 7) / 8;
    const int least = budget.min_bits == 0
                          ? budget.index_bytes
                          : round_up(codes, budget.scale_bytes) + budget.scale_bytes + budget.index_bytes;
    throw Error{ErrorKind::usage,
                fmt::format("byte budget: {} channels of at least {} bits and a scale take {} bytes a row, found {}",
                            channels, budget.min_bits, least, budget.row_bytes)};
  }
  std::vector<std::uint8_t> bits(scores.size());
  std::size_t next = 0;
  for (std::size_t w = 0; w < counts.size(); ++w)
    for (int i = 0; i < counts[w]; ++i) bits[order[next++]] = static_cast<std::uint8_t>(program.widths()[w]);
  return bits;
}

}  // namespace kvq
