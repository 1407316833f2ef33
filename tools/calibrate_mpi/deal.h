#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace kvq {

/// Some processes of a run, which collect some of its layers together. The first rank leads: it collects, and the
/// others compute some of the KV heads for it.
struct Group {
  std::vector<int> ranks;           ///< ascending
  std::vector<std::size_t> layers;  ///< indices, ascending
};

/// Deals layers to `ranks` processes: the layer of the most work first, each to the group that will be done with it
/// first. There is one group for each rank, or, with more ranks than layers, one for each layer. Rank 0 leads the first
/// group.
/// @param work  of each layer, in one unit
std::vector<Group> deal(std::span<const double> work, int ranks);

}  // namespace kvq
