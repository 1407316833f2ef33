#include "calibrate_mpi/deal.h"

#include <algorithm>
#include <numeric>

namespace kvq {

std::vector<Group> deal(std::span<const double> work, int ranks) {
  std::vector<Group> groups(std::min(static_cast<std::size_t>(ranks), work.size()));
  for (int rank = 0; rank < ranks; ++rank) groups[static_cast<std::size_t>(rank) % groups.size()].ranks.push_back(rank);
  std::vector<std::size_t> order(work.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return work[a] > work[b]; });
  std::vector<double> busy(groups.size(), 0.0);
  for (const std::size_t layer : order) {
    const auto end_with = [&](std::size_t g) {
      return busy[g] + work[layer] / static_cast<double>(groups[g].ranks.size());
    };
    std::size_t best = 0;
    for (std::size_t g = 1; g < groups.size(); ++g)
      if (end_with(g) < end_with(best)) best = g;
    busy[best] = end_with(best);
    groups[best].layers.push_back(layer);
  }
  for (Group& group : groups) std::sort(group.layers.begin(), group.layers.end());
  return groups;
}

}  // namespace kvq
