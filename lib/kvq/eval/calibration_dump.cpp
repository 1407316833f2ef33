#include <kvq/dump/content_hash.h>
#include <kvq/eval/calibration_dump.h>

#include <vector>

namespace kvq {

const char* to_string(DumpRelation relation) {
  switch (relation) {
    case DumpRelation::same: return "same";
    case DumpRelation::another: return "another";
    case DumpRelation::unknown: return "unknown";
  }
  return "";
}

DumpRelation relation_to(const Artifact& artifact, const std::map<int, std::string>& layer_hashes) {
  const Json& options = artifact.calibration.options;
  const bool is_part = options.contains("tokens");
  std::vector<std::string> hashes;
  for (const LayerPlan& layer : artifact.layers) {
    const auto found = layer_hashes.find(layer.layer);
    if (found == layer_hashes.end()) return DumpRelation::unknown;
    hashes.push_back(
        is_part ? range_hash_of(found->second, options.at("tokens").at("first"), options.at("tokens").at("count"))
                : found->second);
  }
  return joint_hash_of(hashes) == artifact.calibration.dump_hash ? DumpRelation::same : DumpRelation::another;
}

}  // namespace kvq
