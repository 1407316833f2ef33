#pragma once

#include <kvq/core/side.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvq {

enum class RopeLayout { none, half, interleaved };
enum class AttentionKind { gqa, mla_rope };
enum class CapturePoint { post_rope, pre_rope };

/// How positions enter q and k of one layer (formats/dump.md).
struct RopeStyle {
  RopeLayout layout = RopeLayout::none;
  int dim = 0;                        ///< rotary_dim, even; 0 for none
  int offset = 0;                     ///< first rotary channel
  double attention_factor = 1.0;      ///< factor on cos and sin
  std::vector<double> inv_freq = {};  ///< [dim / 2], radians per position
  bool operator==(const RopeStyle&) const = default;
};

/// Facts of one attention layer. Read from the dump, never derived from each other.
struct LayerGeometry {
  int num_q_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;  ///< of q and k
  int v_head_dim = 0;
  double softmax_scale = 0.0;
  int sliding_window = 0;  ///< keys a query sees, itself included; 0 = all
  AttentionKind kind = AttentionKind::gqa;
  RopeStyle rope = {};
  double logit_softcap = 0.0;            ///< c: the softmax takes c tanh(logit / c); 0 = the logits as they are
  std::vector<double> sink_logits = {};  ///< [num_q_heads] learned sinks, not capped; empty = none
  bool operator==(const LayerGeometry&) const = default;
  int dim(Side side) const { return side == Side::k ? head_dim : v_head_dim; }
  int queries_per_kv_head() const { return num_q_heads / num_kv_heads; }
  /// The learned sinks of the query heads that read a KV head; empty = none.
  std::span<const double> sinks_of(int kv_head) const {
    if (sink_logits.empty()) return {};
    const auto group = static_cast<std::size_t>(queries_per_kv_head());
    return std::span(sink_logits).subspan(static_cast<std::size_t>(kv_head) * group, group);
  }
};

/// Two channels that RoPE rotates together, or two neighboring channels outside the rotary slice. `second` is -1 for
/// the last channel outside the slice if their number is odd.
struct RopeBlock {
  int first = 0, second = -1;
};

/// All blocks of a key: the rotary pairs in the order of `inv_freq`, then the other channels in neighboring pairs,
/// ascending (formats/artifact.md).
std::vector<RopeBlock> rope_blocks(const LayerGeometry& geometry);

/// One layer of a dump; `layer` is its index in the model.
struct LayerEntry {
  int layer = 0;
  LayerGeometry geometry = {};
  bool has_values = true;  ///< false for an mla_rope layer dumped without v
};
/// The model of a dump. `layers` holds the layers that the dump has, ascending by index.
struct ModelGeometry {
  std::string name;
  std::string fingerprint;  ///< SHA-256 in hex, or empty
  std::string config_json;  ///< Hugging Face configuration, or empty
  int num_layers = 0;       ///< of the model; `layers` may be fewer
  std::vector<LayerEntry> layers;
};

const char* to_string(RopeLayout layout);
const char* to_string(AttentionKind kind);
const char* to_string(CapturePoint point);

}  // namespace kvq
