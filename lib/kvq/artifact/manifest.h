#pragma once

#include <kvq/container/json.h>
#include <kvq/plan/layer_plan.h>

#include <string>
#include <vector>

namespace kvq {

/// One side's plan without its tensors, and back. `tensor` fields are filled by the caller.
Json plan_to_json(const TensorPlan& plan, int dim);
/// @param json  fits the schema
TensorPlan plan_from_json(const Json& json);

/// The word of `requires` for layers with capped logits, in artifacts and statistics.
inline const std::string kSoftcapFeature = "logit_softcapping";
/// The word of `requires` for statistics of layers with learned sinks. An artifact does not need it, because the caller
/// of decode names the sinks.
inline const std::string kSinkFeature = "sink_logits";

/// Features since 1.1 that a plan uses: words of `requires`, in the order of kFeatures.
std::vector<std::string> features(const TensorPlan& plan);
inline const std::vector<std::string> kFeatures = {"codebook",  "trellis",       "mixed_widths", "centroids",
                                                   "transform", kSoftcapFeature, "row_scale",    "integer_search"};

/// All features of the layers' plans, in the order of kFeatures: `requires` of their file.
Json required_features(const std::vector<LayerPlan>& layers);
/// The lowest version of the format that has these features, golden rows if `golden`, and fields that 1.3 added if
/// `newest`.
const char* lowest_version(const Json& required, bool golden, bool newest);

}  // namespace kvq
