#include "inspect/serving.h"

#include "common/layers.h"
#include "common/text_wrap.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvq {

namespace {

/// "decode, prefill": the verbs with this kind of kernel.
std::string verbs_with(const ServedBy& served, KernelKind kind) {
  std::string text;
  for (const KernelVerb verb : kKernelVerbs)
    if (served.by(verb) == kind) text += (text.empty() ? "" : ", ") + std::string(to_string(verb));
  return text;
}

/// What pages refuse: equal faults of both sides are said once.
std::string refusal_text(const std::vector<PageFault>& faults) {
  std::string text;
  for (const PageFault& fault : faults) {
    PageFault twin = fault;
    twin.side = other(fault.side);
    const bool both = std::find(faults.begin(), faults.end(), twin) != faults.end();
    if (both && fault.side == Side::v) continue;
    text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", both ? "k and v" : name(fault.side), fault.text());
  }
  return text;
}

Json kernels_json(const ServedBy& served) {
  Json json;
  for (const KernelVerb verb : kKernelVerbs) json[to_string(verb)] = to_string(served.by(verb));
  return json;
}

Json layer_json(const LayerPlan& layer) {
  const ServedBy served = served_by(layer, Activation::bf16);
  Json json = {{"layer", layer.layer}, {"served", served.is_served()}};
  if (served.refused.empty()) {
    json["format"] = cache_format_name(layer);
    for (const Activation activation : kActivations)
      json["kernels"][to_string(activation)] = kernels_json(served_by(layer, activation));
  }
  for (const PageFault& fault : served.refused)
    json["refused"].push_back(
        {{"side", name(fault.side)}, {"what", fault.what}, {"supported", fault.supported}, {"found", fault.found}});
  if (!served.no_kernel.empty()) json["no_kernel"] = served.no_kernel;
  return json;
}

}  // namespace

std::vector<ServingGroup> serving_groups(const Artifact& artifact) {
  std::vector<ServingGroup> groups;
  for (const LayerPlan& layer : artifact.layers) {
    const ServedBy served = served_by(layer, Activation::bf16);
    const std::string format = served.refused.empty() ? cache_format_name(layer) : "";
    auto found = std::find_if(groups.begin(), groups.end(), [&](const ServingGroup& group) {
      return group.format == format && group.served == served;
    });
    if (found == groups.end()) found = groups.insert(groups.end(), {{}, format, served});
    found->layers.push_back(layer.layer);
  }
  return groups;
}

std::string serving_word(const std::vector<ServingGroup>& groups) {
  bool none = false, tuned = false, generic = false;
  for (const ServingGroup& group : groups) {
    none = none || !group.served.is_served();
    tuned = tuned || group.served.by(KernelVerb::decode) == KernelKind::tuned;
    generic = generic || group.served.by(KernelVerb::decode) == KernelKind::generic;
  }
  if (none) return tuned || generic ? "in part" : "not served";
  return tuned && generic ? "tuned and generic" : tuned ? "tuned" : "generic";
}

std::string serving_text(const ServingGroup& group) {
  const ServedBy& served = group.served;
  if (!served.refused.empty()) return "not served: " + refusal_text(served.refused);
  if (!served.no_kernel.empty()) return "not served: " + served.no_kernel;
  const KernelKind own = served.by(KernelVerb::decode),
                   other = own == KernelKind::tuned ? KernelKind::generic : KernelKind::tuned;
  std::string text =
      fmt::format("{} kernels for {}", own == KernelKind::tuned ? "tuned" : "generic, slower", group.format);
  if (const std::string verbs = verbs_with(served, other); !verbs.empty())
    text += fmt::format(" ({}: {})", to_string(other), verbs);
  const std::string none = verbs_with(served, KernelKind::none);
  return none.empty() ? text : text + "; no kernel: " + none;
}

std::string serving_lines(const Artifact& artifact, const std::string& label) {
  const std::vector<ServingGroup> groups = serving_groups(artifact);
  if (groups.size() == 1) return wrapped(label, serving_text(groups.front()));
  std::string text;
  for (const ServingGroup& group : groups)
    text += wrapped(text.empty() ? label : std::string(label.size(), ' '),
                    fmt::format("layers {}: {}", range_text(group.layers), serving_text(group)));
  return text;
}

Json serving_json(const Artifact& artifact) {
  Json layers = Json::array();
  for (const LayerPlan& layer : artifact.layers) layers.push_back(layer_json(layer));
  return {{"word", serving_word(serving_groups(artifact))}, {"layers", std::move(layers)}};
}

}  // namespace kvq
