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

/// Times of PyTorch's attention for given shapes, from scripts/experiments/sdpa_baseline.py in a child process.
class Sdpa {
 public:
  /// Without any times.
  Sdpa() = default;
  /// @param python  Python interpreter that has PyTorch
  /// @throws Error{unsupported} if the script cannot run or reports an error
  Sdpa(const std::string& python, const std::vector<SdpaShape>& shapes);

  std::optional<Timing> find(const SdpaShape& shape) const;
  /// The JSON document of the script, or null.
  const Json& document() const { return document_; }

 private:
  Json document_ = nullptr;
};

}  // namespace kvq::bench
