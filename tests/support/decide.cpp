#include "support/decide.h"

#include <kvq/codec/codec.h>
#include <kvq/stats/collect.h>

namespace kvq::test {

Options options_of(const std::string& method, const std::function<void(Options&)>& change) {
  Options options;
  options.method = method;
  find_method(method).set_defaults(options);
  if (change) change(options);
  return options;
}

LayerStats stats_for(const LayerActivations& layer, const Options& options, std::int64_t sample_tokens) {
  std::set<Moment> moments = find_method(options.method).needs(options);
  if (!layer.v) std::erase_if(moments, [](Moment which) { return which != Moment::query && which != Moment::key; });
  return collect(layer, {
                            .moments = std::move(moments),
                            .sample_tokens = sample_tokens,
                            .seed = options.seed,
                            .held_out_tokens = options.budget_bits || options.budget_bytes ? 32 : 0,
                        });
}

LayerPlan decide_one(const LayerActivations& layer, const Options& options, std::int64_t sample_tokens) {
  return find_method(options.method)
      .decide(MemoryStats({stats_for(layer, options, sample_tokens)}), options, {})
      .plans.at(0);
}

double measured_error(const LayerStats& stats, const TensorPlan& plan, Side side) {
  const int dim = stats.geometry.dim(side);
  const auto d = static_cast<std::size_t>(dim);
  double cost = 0.0, energy = 0.0;
  for (int head = 0; head < stats.geometry.num_kv_heads; ++head) {
    const std::vector<float> rows = (side == Side::k ? stats.sample.k : stats.sample.v).head(head);
    std::vector<float> seen = rows;
    reconstruct(plan, head, seen, dim);
    const std::vector<float> weights = stats.sample.value_weight.empty() || side == Side::k
                                           ? std::vector<float>(rows.size() / d, 1.0f)
                                           : stats.sample.weights(head, stats.geometry.num_kv_heads);
    std::vector<double> metric = std::vector<double>(d * d, 0.0);
    if (side == Side::k)
      metric = mean_moment(stats.moment(Moment::query).at(static_cast<std::size_t>(head)));
    else
      for (std::size_t i = 0; i < d; ++i) metric[i * (d + 1)] = 1.0;
    for (std::size_t t = 0; t < weights.size(); ++t)
      for (std::size_t i = 0; i < d; ++i)
        for (std::size_t j = 0; j < d; ++j) {
          const double m = static_cast<double>(weights[t]) * metric[i * d + j];
          const auto x = static_cast<double>(rows[t * d + i]), y = static_cast<double>(rows[t * d + j]);
          energy += x * m * y;
          cost += (x - static_cast<double>(seen[t * d + i])) * m * (y - static_cast<double>(seen[t * d + j]));
        }
  }
  return cost / energy;
}

}  // namespace kvq::test
