// Writes manifests as seeds for fuzz_manifest: make_manifest_seeds <folder>

#include "support/artifacts.h"

#include <filesystem>
#include <fstream>
#include <iostream>

using namespace kvq;

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: make_manifest_seeds <folder>\n";
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  std::filesystem::create_directories(folder);
  Artifact artifact = test::example_artifact();
  std::ofstream(folder / "everything.json") << canonical_json(artifact_manifest(artifact));
  artifact.layers = {artifact.layers[1]};  // exact rows need no tensors: this one loads
  std::ofstream(folder / "exact.json") << canonical_json(artifact_manifest(artifact));
  artifact.layers[0].k.coder = artifact.layers[0].v->coder = UniformCoder{.bits = 4, .group_size = 4};
  artifact.layers[0].k.clip_ratio = artifact.layers[0].v->clip_ratio = {1.0, 0.96};
  std::ofstream(folder / "plain.json") << canonical_json(artifact_manifest(artifact));
}
