#include "cli.h"
#include "inspect_report.h"

#include <kvq/core/error.h>

#include <unistd.h>

#include <algorithm>

namespace kvq {

namespace {

struct InspectFlags {
  std::string artifact;
  int layer = -1;
  int page_size = 64;
  std::int64_t context = 32768;
  bool json = false, layout = false, verify = false;
};

void add_flags(CLI::App& app, InspectFlags& f) {
  app.description(
      "Prints what a calibration artifact says: per layer how keys and values are stored, and where it came from.\n\n"
      "  kvq-inspect out.safetensors                         the allocation, one line a layer and side\n"
      "  kvq-inspect out.safetensors --layer 3               one layer, every head\n"
      "  kvq-inspect out.safetensors --layout --page-size 64 bytes per token and page\n"
      "  kvq-inspect out.safetensors --verify                hash, schema, orthogonality; exit 6 if one fails");
  app.set_version_flag("--version", "kvq " KVQ_VERSION);
  app.add_option("artifact", f.artifact, "artifact file")->required();
  app.add_option("--layer", f.layer, "show one layer in detail")->check(CLI::Range(0, 4095));
  app.add_flag("--json", f.json, "one JSON document: the manifest, with what was asked for beside it");
  app.add_flag("--layout", f.layout, "bytes per token, per page, alignment");
  app.add_option("--page-size", f.page_size, "tokens of a page, for --layout")->check(CLI::Range(1, 1 << 20))->capture_default_str();
  app.add_option("--context", f.context, "context length, for --layout")->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30))->capture_default_str();
  app.add_flag("--verify", f.verify, "check content hash, schema, orthogonality, finite values");
}

const LayerPlan& find_layer(const Artifact& artifact, int layer) {
  const auto it = std::find_if(artifact.layers.begin(), artifact.layers.end(), [&](const LayerPlan& plan) { return plan.layer == layer; });
  if (it == artifact.layers.end())
    throw Error{ErrorKind::usage, fmt::format("--layer {}: the artifact has {} layers, {} to {}", layer, artifact.layers.size(),
                                              artifact.layers.front().layer, artifact.layers.back().layer)};
  return *it;
}

Json checks_json(const std::vector<Check>& checks) {
  Json json = Json::array();
  for (const Check& check : checks) json.push_back({{"name", check.name}, {"passed", check.passed}, {"detail", check.detail}});
  return json;
}

int inspect(const InspectFlags& flags) {
  const Artifact artifact = load_artifact(flags.artifact);
  const std::vector<Check> checks = flags.verify ? verify_artifact(flags.artifact) : std::vector<Check>{};
  const bool passed = std::all_of(checks.begin(), checks.end(), [](const Check& check) { return check.passed; });
  if (flags.json) {
    Json json = {{"schema_version", "1.0"}, {"tool", "kvq-inspect " KVQ_VERSION}, {"artifact", flags.artifact}, {"manifest", artifact_manifest(artifact)}};
    if (flags.layer >= 0) json["layer"] = json["manifest"]["layers"][static_cast<std::size_t>(&find_layer(artifact, flags.layer) - artifact.layers.data())];
    if (flags.layout) json["layout"] = layout_json(artifact, flags.page_size, flags.context);
    if (flags.verify) json["verify"] = checks_json(checks);
    fmt::print("{}\n", json.dump(2));
    return passed ? 0 : 6;
  }
  if (flags.verify) {
    for (const Check& check : checks) fmt::print("{}  {}: {}\n", check.passed ? "ok    " : "FAILED", check.name, check.detail);
    return passed ? 0 : 6;
  }
  if (flags.layout)
    fmt::print("{}", describe_layout(artifact, flags.page_size, flags.context));
  else if (flags.layer >= 0)
    fmt::print("{}", describe_layer(artifact, find_layer(artifact, flags.layer)));
  else
    fmt::print("{}", describe(artifact, wants_color(STDOUT_FILENO)));
  return 0;
}

}  // namespace

}  // namespace kvq

int main(int argc, char** argv) {
  CLI::App app;
  kvq::InspectFlags flags;
  kvq::add_flags(app, flags);
  return kvq::run_tool("kvq-inspect", app, argc, argv, [&] { return kvq::inspect(flags); });
}
