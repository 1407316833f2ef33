#pragma once

#include <kvq/compute/backend.h>
#include <kvq/compute/cuda/context.h>

#include <functional>
#include <span>

namespace kvq::cuda {

/// Whether the kernels take these head dimensions.
bool can_attend(const LayerGeometry& geometry);
/// Backend::add_attention_moments() of KV heads [first_kv_head, first_kv_head + kv_heads).
void add_attention_moments(Context& context, const SequenceAttention& sequence, int first_kv_head, int kv_heads,
                           bool with_scored_query, std::span<AttentionMoments> into,
                           const std::function<void()>& head_done);

}  // namespace kvq::cuda
