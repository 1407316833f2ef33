#pragma once

#include <kvq/dump/dump_file.h>
#include <kvq/stats/layer_stats.h>

#include <vector>

namespace kvq::test {

/// One moment of one KV head by the words of formats/stats.md, in double.
struct NaiveMoment {
  std::vector<double> sum, first;
  double weight = 0.0;
};
NaiveMoment naive_moment(const LayerActivations& layer, Moment which, int kv_head);

/// What `value_weight` holds for every token of one KV head: sum over queries of S^2, per query head.
std::vector<double> naive_value_weight(const LayerActivations& layer, int kv_head);

}  // namespace kvq::test
