#pragma once

#include <kvq/container/json.h>
#include <kvq/runtime.h>

#include <string>
#include <vector>

namespace kvq {

/// Results of replaying an artifact's golden rows on a device.
struct SelftestReport {
  struct Layer {
    std::string k, v;           ///< storage of a side in pages, "u2g128"; empty if pages cannot hold the side
    kvq_selftest_layer result;  ///< status KVQ_UNSUPPORTED also if pages cannot hold a side or no kernel takes it
  };
  std::string artifact, model, method;
  int device = 0;
  std::string gpu;
  int page_size = 64;
  bool bf16 = true;  ///< type of the kernels' inputs and outputs: bfloat16, else fp16
  std::vector<Layer> layers;

  /// KVQ_OK if every layer passed, KVQ_MISMATCH if one failed, else KVQ_UNSUPPORTED.
  kvq_status status() const;
};

/// Text within 80 columns, except words that are longer.
std::string text_of(const SelftestReport& report);
/// The document of formats/selftest.schema.json.
Json json_of(const SelftestReport& report);

}  // namespace kvq
