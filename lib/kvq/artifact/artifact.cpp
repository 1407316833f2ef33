#include <kvq/artifact/artifact.h>
#include <kvq/artifact/geometry_json.h>
#include <kvq/artifact/golden_tensors.h>
#include <kvq/artifact/manifest.h>
#include <kvq/artifact/side_tensors.h>
#include <kvq/artifact/versions.h>
#include <kvq/core/error.h>
#include <kvq/core/text.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

namespace kvq {

namespace {

constexpr int kMajor = 1;

std::string tensor_name(int layer, Side side, const std::string& what) {
  return fmt::format("layers.{}.{}.{}", layer, name(side), what);
}

template <typename Plan>
std::vector<TensorSpec<Plan>> tensors_of(Plan& plan, const AnnouncedTensors& announced, const LayerGeometry& geometry,
                                         Side side) {
  const int heads = plan.rotation.scope == Scope::layer ? 1 : geometry.num_kv_heads;
  return side_tensors(plan, announced, heads, geometry.dim(side));
}

/// Adds one tensor's values to a file.
struct AddValues {
  SafetensorsWriter& writer;
  std::string name;
  std::vector<std::int64_t> shape;

  template <typename T>
  void operator()(const std::vector<T>* values) const {
    writer.add<T>(name, shape, std::span<const T>{*values});
  }
  void operator()(const std::vector<TrellisTaps>* all) const {
    std::vector<float> thetas;
    for (const TrellisTaps& taps : *all) thetas.insert(thetas.end(), taps.theta.begin(), taps.theta.end());
    (*this)(&std::as_const(thetas));
  }
};

void add_side(SafetensorsWriter& writer, const LayerPlan& layer, const TensorPlan& plan, Side side) {
  for (const auto& tensor : tensors_of(plan, announced_tensors(plan), layer.geometry, side))
    std::visit(AddValues{writer, tensor_name(layer.layer, side, tensor.name), tensor.shape}, tensor.values);
}

/// Reads one tensor's values from a file.
struct ReadValues {
  const SafetensorsFile& file;
  std::string name;
  const std::vector<std::int64_t>& shape;

  template <typename T>
  void operator()(std::vector<T>* values) const {
    *values = file.read<T>(name, shape);
  }
  void operator()(std::vector<TrellisTaps>* all) const {
    const std::vector<float> thetas = file.read<float>(name, shape);
    auto next = thetas.begin();
    for (TrellisTaps& taps : *all) {
      const auto count = taps.bits * (taps.memory + 1);
      taps.theta.assign(next, next + count);
      next += count;
    }
  }
};

class Reader {
 public:
  explicit Reader(const SafetensorsFile& file) : file_(file) {
    for (const auto& [name, info] : file.tensors())
      if (!is_reserved(name)) unread_.insert(name);
  }

  TensorPlan side(const Json& json, int layer, const LayerGeometry& geometry, Side side) {
    TensorPlan plan = plan_of(json, layer, side);
    check_inertia(plan, layer, geometry, side);
    for (const auto& tensor : tensors_of(plan, announced_tensors(json), geometry, side)) {
      const std::string name = tensor_name(layer, side, tensor.name);
      unread_.erase(name);
      std::visit(ReadValues{file_, name, tensor.shape}, tensor.values);
    }
    return plan;
  }

  void expect_all_read() const {
    if (!unread_.empty())
      throw Error{ErrorKind::bad_input,
                  fmt::format("{}: tensor {} is not announced by the manifest", file_.name(), *unread_.begin())};
  }

 private:
  /// Whether a tensor is layers.<i>.golden.*. read_golden_rows() reads the tensors that the manifest announces; a later
  /// minor version may add others.
  static bool is_reserved(const std::string& name) {
    constexpr std::string_view prefix = "layers.";
    if (!name.starts_with(prefix)) return false;
    const auto digits = name.find_first_not_of("0123456789", prefix.size());
    return digits != name.npos && digits > prefix.size() && name.compare(digits, 8, ".golden.") == 0;
  }

  TensorPlan plan_of(const Json& json, int layer, Side side) const {
    try {
      return plan_from_json(json);
    } catch (const Error& error) {
      throw Error{ErrorKind::bad_input,
                  fmt::format("{}: layer {} {}: {}", file_.name(), layer, name(side), error.what())};
    }
  }

  void check_inertia(const TensorPlan& plan, int layer, const LayerGeometry& geometry, Side side) const {
    if (!plan.centroids) return;
    const auto heads = static_cast<std::size_t>(plan.rotation.scope == Scope::layer ? 1 : geometry.num_kv_heads);
    if (plan.centroids->inertia.size() != heads)
      throw Error{ErrorKind::bad_input,
                  fmt::format("{}: layer {} {}: centroids.inertia: expected {} numbers, found {}", file_.name(), layer,
                              name(side), heads, plan.centroids->inertia.size())};
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
  if (json.contains("budget")) p.budget = json.at("budget");
  if (json.contains("held_out")) p.held_out = json.at("held_out");
  return p;
}

void expect_listed(const std::string& word, const Json& required) {
  if (std::find(required.begin(), required.end(), word) == required.end())
    throw Error{ErrorKind::bad_input, fmt::format("uses the feature \"{}\", which `requires` does not list", word)};
}

/// Checks values of the manifest that the plan implies: features in `requires`, mean bits and bytes of a mixed row.
/// @param where  the layer and its side
void check_claims(const TensorPlan& plan, const Json& json, const Json& required, int dim, const std::string& where) {
  for (const std::string& word : features(plan)) expect_listed(word, required);
  if (!plan.allocation) return;
  const int claimed = json.at("allocation").at("row_bytes"), found = row_bytes(plan, dim);
  const double mean = json.at("allocation").at("mean_bits");
  if (mean != plan.allocation->mean_bits())
    throw Error{ErrorKind::bad_input,
                fmt::format("{}: mean_bits: expected {}, found {}", where, plan.allocation->mean_bits(), mean)};
  if (claimed != found)
    throw Error{ErrorKind::bad_input, fmt::format("{}: row_bytes: expected {}, found {}", where, found, claimed)};
}

/// Fields of a geometry that 1.3 added.
bool has_softmax_fields(const LayerGeometry& g) { return g.logit_softcap > 0.0 || !g.sink_logits.empty(); }

/// @throws Error{bad_input} if the file has no content hash or another one than its content
void check_hash(const SafetensorsFile& file) {
  const std::string stated = stated_hash(file), found = content_hash(file, file.metadata().at("kvq.manifest"));
  if (stated != found)
    throw Error{ErrorKind::bad_input,
                fmt::format("{}: content hash: expected {}, found {}", file.name(), printable(stated, 60), found),
                "the file was changed after it was written; kvq-inspect --verify says what else is wrong"};
}

}  // namespace

std::string stated_hash(const SafetensorsFile& file) {
  const auto stated = file.metadata().find("kvq.content_hash");
  return stated == file.metadata().end() ? "none" : stated->second;
}

Artifact load_artifact(const SafetensorsFile& file, HashCheck hash) {
  const Json manifest = read_manifest(file, "kvq-artifact", kMajor, artifact_schema(), kFeatures);
  if (hash == HashCheck::demanded) check_hash(file);
  Artifact artifact;
  artifact.model = model_from_json(manifest.at("model"));
  artifact.calibration = provenance_from_json(manifest.at("calibration"));
  artifact.windows = {manifest.at("windows").at("sink_tokens"), manifest.at("windows").at("recent_tokens")};
  Reader reader(file);
  for (const Json& json : manifest.at("layers")) {
    LayerPlan plan;
    plan.layer = json.at("layer");
    const std::string where = fmt::format("{}: layer {}", file.name(), plan.layer);
    if (plan.layer >= artifact.model.num_layers ||
        (!artifact.layers.empty() && plan.layer <= artifact.layers.back().layer))
      throw Error{ErrorKind::bad_input,
                  fmt::format("{}: layers are not ascending below num_layers {}", where, artifact.model.num_layers)};
    plan.geometry = geometry_from_json(json.at("geometry"), where);
    plan.k = reader.side(json.at("k"), plan.layer, plan.geometry, Side::k);
    if (json.contains("v")) plan.v = reader.side(json.at("v"), plan.layer, plan.geometry, Side::v);
    try {
      validate(plan);
      if (plan.geometry.logit_softcap > 0.0) expect_listed(kSoftcapFeature, manifest.at("requires"));
      for (const Side side : kSides)
        if (const TensorPlan* own = plan.side(side))
          check_claims(*own, json.at(std::string(name(side))), manifest.at("requires"), plan.geometry.dim(side),
                       fmt::format("layer {} {}", plan.layer, name(side)));
    } catch (const Error& error) {
      throw Error{ErrorKind::bad_input, fmt::format("{}: {}", file.name(), error.what())};
    }
    if (json.contains("golden")) artifact.golden[plan.layer] = read_golden_rows(file, plan, json.at("golden"));
    artifact.layers.push_back(std::move(plan));
  }
  reader.expect_all_read();
  return artifact;
}

bool has_fields_of_1_3(const Artifact& artifact) {
  const auto has = [](const TensorPlan& plan) { return plan.error && plan.error->baseline; };
  return !artifact.calibration.held_out.is_null() ||
         std::any_of(artifact.layers.begin(), artifact.layers.end(), [&](const LayerPlan& plan) {
           return has_softmax_fields(plan.geometry) || has(plan.k) || (plan.v && has(*plan.v));
         });
}

Json artifact_manifest(const Artifact& artifact) {
  const Provenance& c = artifact.calibration;
  Json layers = Json::array();
  for (const LayerPlan& plan : artifact.layers) {
    Json layer = {{"layer", plan.layer},
                  {"geometry", geometry_to_json(plan.geometry)},
                  {"k", plan_to_json(plan.k, plan.geometry.head_dim)}};
    if (plan.v) layer["v"] = plan_to_json(*plan.v, plan.geometry.v_head_dim);
    if (const auto it = artifact.golden.find(plan.layer); it != artifact.golden.end())
      layer["golden"] = golden_json(it->second);
    layers.push_back(std::move(layer));
  }
  Json calibration = {
      {"method", c.method},
      {"tool", c.tool},
      {"dump", {{"hash", c.dump_hash}, {"producer", c.dump_producer}, {"capture_point", c.capture_point}}},
      {"tokens", c.tokens},
      {"sequences", c.sequences},
      {"seed", c.seed},
      {"options", c.options}};
  if (!c.budget.is_null()) calibration["budget"] = c.budget;
  if (!c.held_out.is_null()) calibration["held_out"] = c.held_out;
  const Json required = required_features(artifact.layers);
  return {
      {"format", "kvq-artifact"},
      {"version", lowest_version(required, !artifact.golden.empty(), has_fields_of_1_3(artifact))},
      {"requires", required},
      {"model", model_to_json(artifact.model)},
      {"calibration", std::move(calibration)},
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
    add_side(writer, plan, plan.k, Side::k);
    if (plan.v) add_side(writer, plan, *plan.v, Side::v);
    if (const auto it = artifact.golden.find(plan.layer); it != artifact.golden.end())
      add_golden_rows(writer, plan, it->second);
  }
  const Json manifest = artifact_manifest(artifact);
  check_schema(manifest, artifact_schema(), "the new manifest");
  write_manifest(writer, manifest);
  writer.write(path);
}

Artifact load_artifact(const std::filesystem::path& path) { return load_artifact(SafetensorsFile::open(path)); }

}  // namespace kvq
