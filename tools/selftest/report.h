#pragma once

#include <kvq/container/json.h>
#include <kvq/runtime.h>

#include <string>
#include <vector>

namespace kvq {

/// What a device made of an artifact's golden rows.
struct SelftestReport {
  struct Layer {
    std::string k, v;           ///< how pages hold the rows, "u2g128"; empty if they cannot
    kvq_selftest_layer result;  ///< status KVQ_UNSUPPORTED also for what pages cannot hold
  };
  std::string artifact, model, method;
  int device = 0;
  std::string gpu;
  int page_size = 64;
  bool bf16 = true;  ///< what the kernels took and gave, else fp16
  std::vector<Layer> layers;

  /// KVQ_OK if every layer passed, KVQ_MISMATCH if one failed, else KVQ_UNSUPPORTED.
  kvq_status status() const;
};

/// At most 80 columns wide but for words that are longer.
std::string text_of(const SelftestReport& report);
/// As formats/selftest.schema.json has it.
Json json_of(const SelftestReport& report);

}  // namespace kvq
