#pragma once

#include <kvq/artifact/artifact.h>
#include <kvq/plan/serving.h>

#include <string>
#include <vector>

namespace kvq {

/// Layers that the runtime serves alike (plan/serving.h), with bfloat16 activations, or does not serve for one reason.
struct ServingGroup {
  std::vector<int> layers;  ///< ascending
  std::string format;       ///< "u2g64"; empty if pages do not hold the layers
  ServedBy served;
};
/// In the order of the first layer of each group.
std::vector<ServingGroup> serving_groups(const Artifact& artifact);

/// By the kernel of decode: "tuned", "generic", "tuned and generic" if layers differ, "not served", or "in part" if
/// only some layers are served.
std::string serving_word(const std::vector<ServingGroup>& groups);

/// One sentence about a group: "generic, slower kernels for u2g64 (tuned: prefill)", "not served: head_dim: supported
/// multiples of 8 up to 256, found 320".
std::string serving_text(const ServingGroup& group);

/// Paragraphs about all layers, behind a label of the first line: one sentence if all layers are alike, else one for
/// each group.
std::string serving_lines(const Artifact& artifact, const std::string& label);

/// For --json: {"word", "layers": [{"layer", "served", "format", "kernels": {"bf16": {"decode": "tuned", ..}, ..},
/// "refused": [{"side", "what", "supported", "found"}], "no_kernel"}]}.
Json serving_json(const Artifact& artifact);

}  // namespace kvq
