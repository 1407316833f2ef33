#include <kvq/codec/codec.h>
#include <kvq/codec/linear_basis.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/error.h>
#include <kvq/plan/layer_pages.h>
#include <kvq/plan/linear_rows.h>

#include <cmath>
#include <cstddef>

namespace kvq {

namespace {

/// Weights of the bits of the codes that a channel's value depends on: [memory + 1][bits], its own code first. Rows of
/// one scale have unit values of symmetric codes, others half their levels.
struct CodeWeights {
  bool unit_values;

  std::vector<double> operator()(const UniformCoder& coder) const {
    std::vector<double> weights;
    for (int bit = 0; bit < coder.bits; ++bit)
      weights.push_back(std::ldexp(unit_values ? static_cast<double>(gaussian_step(coder.bits)) : 1.0, bit));
    return weights;
  }
  std::vector<double> operator()(const CodebookGroup& coder) const { return bit_weights(coder.table()); }
  std::vector<double> operator()(const TrellisGroup& coder) const { return bit_weights(coder.values()); }
};

}  // namespace

std::vector<double> linear_basis(const TensorPlan& plan, int kv_head, int dim, Side side, int row_bits) {
  KVQ_ASSERT(is_linear(plan, kv_head, dim));
  const RowCodec codec(plan, kv_head, dim);
  const CodeWeights weights_of{codec.row_scale() != nullptr};
  const std::vector<BitSegment> segments = bit_segments(plan, kv_head, dim);
  const auto bits = static_cast<std::size_t>(row_bits);
  std::vector<double> basis(static_cast<std::size_t>(dim) * bits);
  for (std::size_t s = 0; s < segments.size(); ++s) {  // one scale, so a segment is a group
    const BitSegment& segment = segments[s];
    KVQ_ASSERT(segment.first_bit + segment.channels * segment.bits <= row_bits);
    std::vector<double> weights;
    if (const UniformCoder* uniform = codec.uniform()) {
      weights = weights_of(*uniform);
    } else {
      weights = std::visit(weights_of, codec.groups()[s].coder);
      for (double& weight : weights) weight *= static_cast<double>(codec.groups()[s].gain);
    }
    for (int channel = 0; channel < segment.channels; ++channel)
      for (int i = 0; i < static_cast<int>(weights.size()); ++i) {
        // The codes before the first channel are those of the last ones.
        const int from = (channel - i / segment.bits + segment.channels) % segment.channels, bit = i % segment.bits;
        const int place = side == Side::k ? key_bit(segment, from, bit) : value_bit(segment, from, bit);
        basis[static_cast<std::size_t>(segment.first_channel + channel) * bits + static_cast<std::size_t>(place)] +=
            weights[static_cast<std::size_t>(i)];
      }
  }
  return basis;
}

}  // namespace kvq
