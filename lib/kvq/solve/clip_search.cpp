#include <kvq/solve/clip_search.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace kvq {

ClipChoice search_clip(std::span<const RotatedData> heads, const UniformCoder& coder, Backend& backend) {
  const int dim = heads.front().dim;
  std::vector<double> ratios;
  std::vector<std::size_t> tried;
  for (int percent = 100; percent >= 85; --percent) {
    const double ratio = percent / 100.0;
    // Ratios that name the same order statistic give the same codes.
    const auto last = static_cast<std::size_t>(dim) - 1;
    const std::size_t index = std::min(static_cast<std::size_t>(std::floor(ratio * dim)), last);
    if (std::find(tried.begin(), tried.end(), index) != tried.end()) continue;
    tried.push_back(index);
    ratios.push_back(ratio);
  }
  std::vector<RowCodec> codecs;
  codecs.reserve(ratios.size());  // so that tasks may point at them
  std::vector<CodingTask> tasks;
  for (const double ratio : ratios) {
    codecs.emplace_back(coder, ratio, dim);
    for (const RotatedData& data : heads) tasks.push_back({&data, &codecs.back()});
  }
  const std::vector<double> costs = backend.clip_costs(tasks);
  ClipChoice best{1.0, 0.0};
  for (std::size_t i = 0; i < ratios.size(); ++i) {
    double cost = 0.0;
    for (std::size_t h = 0; h < heads.size(); ++h) cost += costs[i * heads.size() + h];
    if (i == 0 || cost < best.cost) best = {ratios[i], cost};
  }
  return best;
}

}  // namespace kvq
