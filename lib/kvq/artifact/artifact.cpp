#include <kvq/artifact/artifact.h>
#include <kvq/artifact/geometry_json.h>
#include <kvq/artifact/manifest.h>
#include <kvq/artifact/versions.h>
#include <kvq/core/error.h>

#include <set>

namespace kvq {

namespace {

constexpr int kMajor = 1;

std::string tensor_name(int layer, char side, const char* what) { return fmt::format("layers.{}.{}.{}", layer, side, what); }

/// The tensors of one side, in one place for both directions: `visit(name, values, shape)` for each that is there or, when
/// reading, each that the manifest announces.
struct SideExtents {
  std::int64_t heads, dim;
};
SideExtents extents(const LayerGeometry& geometry, const Rotation& rotation, char side) {
  return {rotation.scope == Scope::layer ? 1 : geometry.num_kv_heads, side == 'k' ? geometry.head_dim : geometry.v_head_dim};
}

void add_side(SafetensorsWriter& writer, const LayerPlan& layer, const TensorPlan& plan, char side) {
  const auto [heads, dim] = extents(layer.geometry, plan.rotation, side);
  const auto add_floats = [&](const char* what, const std::vector<float>& values, std::vector<std::int64_t> shape) {
    if (!values.empty()) writer.add<float>(tensor_name(layer.layer, side, what), std::move(shape), std::span<const float>{values});
  };
  add_floats("rotation", plan.rotation.matrix, {heads, dim, dim});
  add_floats("eigenbasis", plan.rotation.eigenbasis, {heads, dim, dim});
  add_floats("spectrum", plan.rotation.spectrum, {heads, dim});
  add_floats("center", plan.center, {heads, dim});
  if (!plan.rotation.signs.empty())
    writer.add<std::int8_t>(tensor_name(layer.layer, side, "hadamard_signs"), {heads, dim}, std::span<const std::int8_t>{plan.rotation.signs});
}

class Reader {
 public:
  explicit Reader(const SafetensorsFile& file) : file_(file) {
    for (const auto& [name, info] : file.tensors())
      if (!is_reserved(name)) unread_.insert(name);
  }

  TensorPlan side(const Json& json, int layer, const LayerGeometry& geometry, char side) {
    TensorPlan plan = plan_of(json, layer, side);
    const auto [heads, dim] = extents(geometry, plan.rotation, side);
    if (plan.rotation.kind == RotationKind::dense) plan.rotation.matrix = floats(tensor_name(layer, side, "rotation"), {heads, dim, dim});
    const Json& rotation = json.at("rotation");
    if (rotation.value("eigenbasis", false)) {
      plan.rotation.eigenbasis = floats(tensor_name(layer, side, "eigenbasis"), {heads, dim, dim});
      plan.rotation.spectrum = floats(tensor_name(layer, side, "spectrum"), {heads, dim});
    }
    if (rotation.value("signs", false)) {
      const std::string name = tensor_name(layer, side, "hadamard_signs");
      unread_.erase(name);
      plan.rotation.signs = file_.read<std::int8_t>(name, {heads, dim});
    }
    if (json.at("center").get<bool>()) plan.center = floats(tensor_name(layer, side, "center"), {heads, dim});
    return plan;
  }

  void expect_all_read() const {
    if (!unread_.empty())
      throw Error{ErrorKind::bad_input, fmt::format("{}: tensor {} is not announced by the manifest", file_.name(), *unread_.begin())};
  }

 private:
  /// layers.<i>.golden.* is reserved for test rows, which a later minor version defines.
  static bool is_reserved(const std::string& name) {
    constexpr std::string_view prefix = "layers.";
    if (!name.starts_with(prefix)) return false;
    const auto digits = name.find_first_not_of("0123456789", prefix.size());
    return digits != name.npos && digits > prefix.size() && name.compare(digits, 8, ".golden.") == 0;
  }

  TensorPlan plan_of(const Json& json, int layer, char side) const {
    try {
      return plan_from_json(json);
    } catch (const Error& error) {
      throw Error{ErrorKind::bad_input, fmt::format("{}: layer {} {}: {}", file_.name(), layer, side, error.what())};
    }
  }

  std::vector<float> floats(const std::string& name, const std::vector<std::int64_t>& shape) {
    unread_.erase(name);
    return file_.read<float>(name, shape);
  }

  const SafetensorsFile& file_;
  std::set<std::string> unread_;
};

Provenance provenance_from_json(const Json& json) {
  Provenance p;
  p.method = json.at("method");
  p.tool = json.at("tool");
  p.dump_hash = json.at("dump").at("hash");
  p.dump_producer = json.at("dump").at("producer");
  p.capture_point = json.at("dump").at("capture_point");
  p.tokens = json.at("tokens");
  p.sequences = json.at("sequences");
  p.seed = json.at("seed");
  p.options = json.at("options");
  return p;
}

}  // namespace

Artifact load_artifact(const SafetensorsFile& file) {
  const Json manifest = read_manifest(file, "kvq-artifact", kMajor, artifact_schema());
  Artifact artifact;
  artifact.model = model_from_json(manifest.at("model"));
  artifact.calibration = provenance_from_json(manifest.at("calibration"));
  artifact.windows = {manifest.at("windows").at("sink_tokens"), manifest.at("windows").at("recent_tokens")};
  Reader reader(file);
  for (const Json& json : manifest.at("layers")) {
    LayerPlan plan;
    plan.layer = json.at("layer");
    const std::string where = fmt::format("{}: layer {}", file.name(), plan.layer);
    if (plan.layer >= artifact.model.num_layers || (!artifact.layers.empty() && plan.layer <= artifact.layers.back().layer))
      throw Error{ErrorKind::bad_input, fmt::format("{}: layers are not ascending below num_layers {}", where, artifact.model.num_layers)};
    plan.geometry = geometry_from_json(json.at("geometry"), where);
    plan.k = reader.side(json.at("k"), plan.layer, plan.geometry, 'k');
    if (json.contains("v")) plan.v = reader.side(json.at("v"), plan.layer, plan.geometry, 'v');
    try {
      validate(plan);
    } catch (const Error& error) {
      throw Error{ErrorKind::bad_input, fmt::format("{}: {}", file.name(), error.what())};
    }
    artifact.layers.push_back(std::move(plan));
  }
  reader.expect_all_read();
  return artifact;
}

Json artifact_manifest(const Artifact& artifact) {
  const Provenance& c = artifact.calibration;
  Json layers = Json::array();
  for (const LayerPlan& plan : artifact.layers) {
    Json layer = {{"layer", plan.layer}, {"geometry", geometry_to_json(plan.geometry)}, {"k", plan_to_json(plan.k)}};
    if (plan.v) layer["v"] = plan_to_json(*plan.v);
    layers.push_back(std::move(layer));
  }
  return {{"format", "kvq-artifact"},
          {"version", "1.0"},
          {"requires", Json::array()},
          {"model", model_to_json(artifact.model)},
          {"calibration",
           {{"method", c.method},
            {"tool", c.tool},
            {"dump", {{"hash", c.dump_hash}, {"producer", c.dump_producer}, {"capture_point", c.capture_point}}},
            {"tokens", c.tokens},
            {"sequences", c.sequences},
            {"seed", c.seed},
            {"options", c.options}}},
          {"windows", {{"sink_tokens", artifact.windows.sink_tokens}, {"recent_tokens", artifact.windows.recent_tokens}}},
          {"layers", std::move(layers)}};
}

void save_artifact(const Artifact& artifact, const std::filesystem::path& path) {
  SafetensorsWriter writer;
  for (const LayerPlan& plan : artifact.layers) {
    try {
      validate(plan);
    } catch (const Error& error) {
      throw Error{ErrorKind::internal, fmt::format("bug: a plan to save is not valid: {}", error.what())};
    }
    add_side(writer, plan, plan.k, 'k');
    if (plan.v) add_side(writer, plan, *plan.v, 'v');
  }
  const Json manifest = artifact_manifest(artifact);
  check_schema(manifest, artifact_schema(), "the new manifest");
  write_manifest(writer, manifest);
  writer.write(path);
}

Artifact load_artifact(const std::filesystem::path& path) { return load_artifact(SafetensorsFile::open(path)); }

std::vector<Check> verify_artifact(const std::filesystem::path& path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  const Artifact artifact = load_artifact(file);  // structure, schema, shapes and finite values, or an error
  std::vector<Check> checks;
  checks.push_back({"schema, tensors, finite values", true, fmt::format("{} layers, {} tensors", artifact.layers.size(), file.tensors().size())});

  const auto claimed = file.metadata().find("kvq.content_hash");
  const std::string found = content_hash(file, file.metadata().at("kvq.manifest"));
  const std::string expected = claimed == file.metadata().end() ? "none" : claimed->second;
  checks.push_back({"content hash", expected == found, expected == found ? found : fmt::format("expected {}, found {}", expected, found)});

  double worst = 0.0;
  for (const LayerPlan& plan : artifact.layers) {
    worst = std::max(worst, orthogonality_error(plan.k.rotation, plan.geometry.head_dim));
    if (plan.v) worst = std::max(worst, orthogonality_error(plan.v->rotation, plan.geometry.v_head_dim));
  }
  checks.push_back({"orthogonality", worst <= 1e-6, fmt::format("max |R^T R - I| = {:.2e}, allowed 1e-6", worst)});
  return checks;
}

}  // namespace kvq
