#pragma once

#include <kvq/dump/dump_file.h>
#include <kvq/stats/layer_stats.h>

#include <vector>

namespace kvq::test {

/// One moment of one KV head, in double, by the definition in formats/stats.md.
struct NaiveMoment {
  std::vector<double> sum, first;
  double weight = 0.0;
};
NaiveMoment naive_moment(const LayerActivations& layer, Moment which, int kv_head);

/// The `value_weight` of every token of one KV head: the sum over queries of S^2, divided by the KV head's number of
/// query heads.
std::vector<double> naive_value_weight(const LayerActivations& layer, int kv_head);

}  // namespace kvq::test
