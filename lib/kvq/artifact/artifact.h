#pragma once

#include <kvq/container/json.h>
#include <kvq/container/safetensors.h>
#include <kvq/plan/golden_rows.h>
#include <kvq/plan/layer_plan.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace kvq {

/// Where a plan came from (formats/artifact.md, `calibration`).
struct Provenance {
  std::string method;
  std::string tool = "kvq " KVQ_VERSION;
  std::string dump_hash;  ///< "xxh3-128:..."
  std::string dump_producer;
  std::string capture_point;  ///< "post_rope" or "pre_rope"
  std::int64_t tokens = 0;
  std::int64_t sequences = 0;
  std::uint64_t seed = 0;
  Json options = Json::object();
  Json budget;    ///< null, or the report of a budget over layers (formats/artifact.md)
  Json held_out;  ///< null, or the error on held-out tokens (formats/artifact.md)
};

/// The whole artifact in memory.
struct Artifact {
  ModelGeometry model;  ///< without `layers`: each plan carries its geometry
  Provenance calibration;
  Windows windows;
  std::vector<LayerPlan> layers;          ///< ascending
  std::map<int, GoldenRows> golden = {};  ///< by layer; only layers that have golden rows
};

/// Whether the artifact has fields of format 1.3: baselines of errors, errors on held-out tokens, soft caps, learned
/// sinks.
bool has_fields_of_1_3(const Artifact& artifact);

/// Writes atomically; equal artifacts give equal bytes. @throws Error{io}, Error{internal} for an invalid plan
void save_artifact(const Artifact& artifact, const std::filesystem::path& path);

/// Whether a reader compares a file's content with its content hash.
enum class HashCheck { demanded, left_out };

/// Reads an artifact. Checks versions, manifest, tensors, finite numbers and the content hash; verify_artifact()
/// (kvq/artifact/verify.h) checks what takes longer.
/// @param hash  left_out only for callers that report a wrong hash themselves
/// @throws Error{io, bad_input, unsupported}
Artifact load_artifact(const std::filesystem::path& path);
Artifact load_artifact(const SafetensorsFile& file, HashCheck hash = HashCheck::demanded);

/// The content hash that the file's metadata state, or "none".
std::string stated_hash(const SafetensorsFile& file);

/// The manifest as stored, for `--json`.
Json artifact_manifest(const Artifact& artifact);

}  // namespace kvq
