#pragma once

#include <kvq/compute/backend.h>
#include <kvq/dump/dump_file.h>

#include <vector>

namespace kvq::test {

/// All moments of a layer that is one sequence, with scored queries, as add_attention_moments() leaves them.
inline std::vector<AttentionMoments> attention_moments(Backend& backend, const LayerActivations& layer) {
  const LayerGeometry& g = layer.geometry;
  std::vector<AttentionMoments> moments(static_cast<std::size_t>(g.num_kv_heads),
                                        {MomentSum{g.v_head_dim}, MomentSum{g.head_dim}, {}});
  backend.add_attention_moments({.geometry = g,
                                 .q = layer.q.view(),
                                 .k = layer.k.view(),
                                 .v = layer.v->view(),
                                 .first = 0,
                                 .count = layer.k.tokens},
                                true, moments, {});
  return moments;
}

}  // namespace kvq::test
