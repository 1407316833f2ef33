#pragma once

#include <kvq/dump/dump_file.h>
#include <kvq/methods/method.h>
#include <kvq/stats/layer_stats.h>

#include "support/naive_attention.h"

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

/// Layers in memory, with random data, as a dump would give them.
namespace kvq::test {

struct LayerSpec {
  int layer = 0;
  int num_q_heads = 4, num_kv_heads = 2, head_dim = 16, v_head_dim = 12;
  std::vector<std::int64_t> lengths = {13, 1, 31};  ///< tokens of each sequence
  bool has_values = true;
  DType dtype = DType::f32;
  int sliding_window = 0;
  double softmax_scale = 0.25;
  std::uint64_t seed = 1;
  bool outliers = false;  ///< a few large channels in q, k and v
};
LayerActivations make_layer(const LayerSpec& spec);

/// The layer with only sequences [first, first + count).
LayerActivations keep_sequences(const LayerActivations& layer, std::size_t first, std::size_t count);

/// One sequence and KV head as input of the naive attention.
AttentionCase attention_case(const LayerActivations& layer, std::size_t sequence, int kv_head);

/// All moments of a layer with or without values.
std::set<Moment> all_moments(bool has_values);

/// Statistics in memory, for Method::decide().
class MemoryStats : public StatsSource {
 public:
  explicit MemoryStats(std::vector<LayerStats> layers) : layers_(std::move(layers)) {}
  std::size_t size() const override { return layers_.size(); }
  std::shared_ptr<const LayerStats> load(std::size_t index) const override {
    return std::make_shared<LayerStats>(layers_.at(index));
  }

 private:
  std::vector<LayerStats> layers_;
};

}  // namespace kvq::test
