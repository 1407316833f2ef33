#pragma once

#include <kvq/plan/golden_rows.h>
#include <kvq/plan/layer_plan.h>
#include <kvq/plan/page_layout.h>
#include <kvq/runtime/device_image.h>
#include <kvq/runtime/head_slice.h>
#include <kvq/runtime/kernel_choice.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace kvq {

/// What an engine believes one layer is. Missing values are not compared.
struct LayerClaim {
  int num_q_heads = 0, num_kv_heads = 0, head_dim = 0, v_head_dim = 0, sliding_window = 0;
  std::optional<RopeLayout> rope = {};
  std::optional<int> rotary_dim = {};
  std::optional<double> softmax_scale = {}, logit_softcap = {};
  Folded folded = {};
};

/// What an engine believes its model is, and which part of the model it serves.
struct ModelClaim {
  int num_layers = 0;
  std::vector<LayerClaim> layers = {};  ///< [num_layers]
  std::optional<std::string> fingerprint = {};
  int first_layer = 0, layer_count = 0;
  int tp_rank = 0, tp_size = 1;
  bool bf16 = true;  ///< activations are bfloat16, else fp16
  int page_size = 64;
  int max_step_tokens = 1;
  bool without_windows = false;
};

/// One layer as one rank holds it.
struct LoadedLayer {
  LayerPlan plan;  ///< of this rank's heads
  HeadSlice heads;
  Folded folded;
  PageLayout pages;
  KernelKey key;
  WindowLayouts windows;
  std::optional<GoldenRows> golden;
};

/// One rank's part of an artifact, checked against what the engine believes.
struct LoadedModel {
  ModelClaim claim;
  std::string name, method;
  Windows windows;
  std::vector<LoadedLayer> layers;  ///< ascending without gaps
  DeviceImage image;
  std::string content_hash;  ///< of the artifact: "xxh3-128:..."

  const LoadedLayer* find(int layer) const;
};

/// What DeviceImage::add() needs to know of a layer's kernels.
inline BitKernels bit_kernels(const KernelKey& key) {
  return {.decode = decodes_linear_rows(key),
          .dequantize = dequantizes_bits(key),
          .decoded = {key.k_rows == TunedRows::coded, key.v_rows == TunedRows::coded}};
}

/// @throws  Error{usage} for a claim that contradicts itself, Error{check_failed} for an artifact of another model,
///          Error{unsupported} for formats that pages do not hold or that have no kernels; each names all faults of its
///          kind. Errors of load_artifact()
LoadedModel load_model(const std::filesystem::path& path, const ModelClaim& claim);

}  // namespace kvq
