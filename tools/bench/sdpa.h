#pragma once

#include "bench/device.h"

#include <kvq/container/json.h>

#include <optional>
#include <string>
#include <vector>

namespace kvq::bench {

/// Attention over contiguous bfloat16 K and V; q_len 1 is decode.
struct SdpaShape {
  int batch = 1, context = 1, q_len = 1, num_q_heads = 32, num_kv_heads = 8, head_dim = 128;
  bool operator==(const SdpaShape&) const = default;
};

/// What PyTorch needs for them: scripts/sdpa_baseline.py, run as a child.
class Sdpa {
 public:
  /// Knows nothing.
  Sdpa() = default;
  /// @param python  interpreter whose PyTorch is asked
  /// @throws Error{unsupported} if it cannot be run, or refuses
  Sdpa(const std::string& python, const std::vector<SdpaShape>& shapes);

  std::optional<Timing> find(const SdpaShape& shape) const;
  /// The script's document, or null.
  const Json& document() const { return document_; }

 private:
  Json document_ = nullptr;
};

}  // namespace kvq::bench
