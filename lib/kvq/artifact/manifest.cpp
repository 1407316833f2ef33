#include <kvq/artifact/manifest.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <array>
#include <set>
#include <string_view>

namespace kvq {

namespace {

/// The fields of a coder beside its name and bits. Tables and thetas are tensors.
struct CoderToJson {
  Json& json;
  void operator()(const ExactCoder&) const {}
  void operator()(const UniformCoder& coder) const {
    add_groups(coder);
    if (coder.levels == UniformLevels::affine) json["zero"] = to_string(coder.zero);
  }
  void operator()(const CodebookCoder& coder) const {
    add_groups(coder);
    Json bits = Json::array();
    for (const auto& [width, table] : coder.tables) bits.push_back(width);
    json["codebooks"] = {
        {"bits", std::move(bits)}, {"per_head", coder.per_head}, {"source", coder.fitted ? "fitted" : "sphere"}};
  }
  void operator()(const TrellisCoder& coder) const {
    add_groups(coder);
    json["trellis"] = Json::array();
    for (const TrellisTaps& taps : coder.taps) {
      Json& item = json["trellis"].emplace_back(Json{{"bits", taps.bits}, {"memory", taps.memory}});
      if (taps.search == TrellisSearch::integer) item["search"] = "integer";
    }
  }
  void add_groups(const auto& coder) const {
    if (coder.group_size > 0) json["group_size"] = coder.group_size;
    json["scale_type"] = to_string(coder.scale_type);
    json["scale_rule"] = to_string(coder.rule);
  }
};

void coder_to_json(const Coder& coder, Json& json) {
  json["coder"] = coder_name(coder);
  json["bits"] = code_bits(coder);
  std::visit(CoderToJson{json}, coder);
}

Json allocation_to_json(const TensorPlan& plan, int dim) {
  const BitAllocation& a = *plan.allocation;
  Json json = {{"unit", a.unit},
               {"score", a.score},
               {"mean_bits", a.mean_bits()},
               {"row_bytes", row_bytes(plan, dim)},
               {"objective", a.objective},
               {"free_objective", a.free_objective}};
  if (a.has_row_scale()) json["scale_scope"] = "row";
  return json;
}

Json centroids_to_json(const Centroids& c) {
  return {{"count", c.count},
          {"scope", c.joint ? "joint" : "kv_head"},
          {"order", c.after_rotation ? "after" : "before"},
          {"inertia", c.inertia}};
}

Json rotation_to_json(const Rotation& rotation) {
  Json json = {{"kind", to_string(rotation.kind)},
               {"scope", to_string(rotation.scope)},
               {"recipe", rotation.recipe},
               {"signs", !rotation.signs.empty()},
               {"eigenbasis", !rotation.eigenbasis.empty()}};
  if (!rotation.inverse.empty()) json["inverse"] = true;
  if (!rotation.channel_scale.empty()) json["channel_scale"] = true;
  if (rotation.order > 0) json["order"] = rotation.order;
  if (!rotation.target.empty()) json["target"] = rotation.target;
  if (!rotation.sign_choice.empty()) json["sign_choice"] = rotation.sign_choice;
  return json;
}

Rotation rotation_from_json(const Json& json) {
  Rotation rotation;
  const std::string kind = json.at("kind");
  rotation.kind = kind == "dense"            ? RotationKind::dense
                  : kind == "block_hadamard" ? RotationKind::block_hadamard
                                             : RotationKind::identity;
  rotation.scope = json.at("scope") == "layer" ? Scope::layer : Scope::kv_head;
  rotation.recipe = json.at("recipe");
  rotation.order = json.value("order", 0);
  rotation.target = json.value("target", "");
  rotation.sign_choice = json.value("sign_choice", std::vector<std::string>{});
  return rotation;
}

template <typename Enum, std::size_t N>
Enum enum_from(const std::string& name, const std::array<Enum, N>& values) {
  for (const Enum value : values)
    if (name == to_string(value)) return value;
  throw Error{ErrorKind::bad_input, fmt::format("unknown word \"{}\" in a plan", name)};
}

/// Reads the fields that CoderToJson wrote. Tables and thetas get their widths and memories but stay empty, because
/// their values are tensors.
struct CoderFromJson {
  const Json& json;
  void operator()(ExactCoder&) const {}
  void operator()(UniformCoder& coder) const {
    read_groups(coder);
    if (coder.levels == UniformLevels::affine)
      coder.zero = enum_from(block("zero"), std::array{ZeroKind::floating, ZeroKind::integer});
  }
  void operator()(CodebookCoder& coder) const {
    const Json& codebooks = block("codebooks");
    read_groups(coder);
    coder.per_head = codebooks.at("per_head");
    coder.fitted = codebooks.at("source") == "fitted";
    for (const Json& width : codebooks.at("bits")) coder.tables[width.get<int>()] = {};
  }
  void operator()(TrellisCoder& coder) const {
    const Json& trellis = block("trellis");
    read_groups(coder);
    for (const Json& taps : trellis)
      coder.taps.push_back({.bits = taps.at("bits"),
                            .memory = taps.at("memory"),
                            .search = taps.contains("search") ? TrellisSearch::integer : TrellisSearch::binary32});
  }

  /// A field that this kind of coder must have; the schema does not require a field for one kind alone.
  const Json& block(const char* key) const {
    if (json.contains(key)) return json.at(key);
    throw Error{ErrorKind::bad_input, fmt::format("coder {} without \"{}\"", json.at("coder").get<std::string>(), key)};
  }
  void read_groups(auto& coder) const {
    coder.bits = json.at("bits");
    coder.group_size = json.value("group_size", 0);
    coder.rule = enum_from(
        json.at("scale_rule"),
        std::array{ScaleRule::minmax, ScaleRule::absmax, ScaleRule::least_squares, ScaleRule::norm, ScaleRule::rms});
    coder.scale_type = enum_from(json.at("scale_type"), std::array{ScaleType::fp16, ScaleType::bf16, ScaleType::fp32});
  }
};

Coder coder_from_json(const Json& json) {
  Coder coder = default_coder(enum_from(json.at("coder"), kCoderKinds));
  std::visit(CoderFromJson{json}, coder);
  return coder;
}

/// Fields of a plan that a kind of coder has beside those of every plan.
struct CoderFields {
  std::vector<std::string_view> operator()(const ExactCoder&) const { return {}; }
  std::vector<std::string_view> operator()(const UniformCoder& coder) const {
    return with_scales(coder.levels == UniformLevels::affine ? "zero" : "allocation");
  }
  std::vector<std::string_view> operator()(const CodebookCoder&) const {
    return with_scales("codebooks", "allocation");
  }
  std::vector<std::string_view> operator()(const TrellisCoder&) const { return with_scales("trellis", "allocation"); }
  static std::vector<std::string_view> with_scales(std::string_view own, std::string_view other = "centroids") {
    return {"scale_type", "scale_rule", "group_size", "centroids", own, other};
  }
};

/// Refuses fields that belong to other coders.
void check_fields(const Json& json, const Coder& coder) {
  const std::vector<std::string_view> own = std::visit(CoderFields{}, coder);
  for (const char* field :
       {"scale_type", "scale_rule", "group_size", "zero", "codebooks", "trellis", "allocation", "centroids"})
    if (json.contains(field) && std::find(own.begin(), own.end(), field) == own.end())
      throw Error{ErrorKind::bad_input, fmt::format("{}: does not go with the coder {}", field, coder_name(coder))};
}

/// The word of `requires` that a coder adds, or null for a coder of version 1.0.
struct CoderFeature {
  const char* operator()(const ExactCoder&) const { return nullptr; }
  const char* operator()(const UniformCoder&) const { return nullptr; }
  const char* operator()(const CodebookCoder&) const { return "codebook"; }
  const char* operator()(const TrellisCoder&) const { return "trellis"; }
};

BitAllocation allocation_from_json(const Json& json) {
  BitAllocation a;
  a.unit = json.at("unit");
  a.score = json.at("score");
  a.objective = json.at("objective");
  a.free_objective = json.at("free_objective");
  return a;
}

Centroids centroids_from_json(const Json& json) {
  return {
      .count = json.at("count"),
      .joint = json.at("scope") == "joint",
      .after_rotation = json.at("order") == "after",
      .values = {},
      .inertia = json.at("inertia"),
  };
}

Json error_to_json(const FitError& error) {
  Json json = {{"metric", error.metric}, {"before", error.before}, {"after", error.after}};
  if (error.baseline) json["baseline"] = {{"bits", error.baseline->bits}, {"group_size", error.baseline->group_size}};
  return json;
}

FitError error_from_json(const Json& json) {
  FitError error{json.at("metric"), json.at("before"), json.at("after"), {}};
  if (json.contains("baseline")) {
    const Json& baseline = json.at("baseline");
    error.baseline = BaselineCodes{baseline.at("bits"), baseline.at("group_size")};
  }
  return error;
}

}  // namespace

std::vector<std::string> features(const TensorPlan& plan) {
  std::vector<std::string> words;
  if (const char* word = std::visit(CoderFeature{}, plan.coder)) words.push_back(word);
  if (plan.allocation) words.push_back("mixed_widths");
  if (plan.centroids) words.push_back("centroids");
  if (plan.transform) words.push_back("transform");
  if (plan.allocation && plan.allocation->has_row_scale()) words.push_back("row_scale");
  if (const auto* trellis = std::get_if<TrellisCoder>(&plan.coder); trellis && trellis->searches_integers())
    words.push_back("integer_search");
  return words;
}

Json required_features(const std::vector<LayerPlan>& layers) {
  std::set<std::string> used;
  for (const LayerPlan& plan : layers) {
    for (const std::string& word : features(plan.k)) used.insert(word);
    if (plan.geometry.logit_softcap > 0.0) used.insert(kSoftcapFeature);
    if (!plan.v) continue;
    for (const std::string& word : features(*plan.v)) used.insert(word);
  }
  Json words = Json::array();
  for (const std::string& word : kFeatures)
    if (used.count(word)) words.push_back(word);
  return words;
}

const char* lowest_version(const Json& required, bool golden, bool newest) {
  const auto has = [&](const char* word) {
    return std::find(required.begin(), required.end(), word) != required.end();
  };
  if (has("integer_search")) return "1.5";
  if (has("row_scale")) return "1.4";
  if (newest) return "1.3";
  if (has("transform")) return "1.2";
  return required.empty() && !golden ? "1.0" : "1.1";
}

Json plan_to_json(const TensorPlan& plan, int dim) {
  Json json = {{"center", !plan.center.empty()}, {"rotation", rotation_to_json(plan.rotation)}};
  coder_to_json(plan.coder, json);
  if (plan.allocation) json["allocation"] = allocation_to_json(plan, dim);
  if (plan.centroids) json["centroids"] = centroids_to_json(*plan.centroids);
  if (plan.transform)
    json["transform"] = {{"kind", plan.transform->kind},
                         {"outlier_gain", plan.transform->outlier_gain},
                         {"condition", plan.transform->condition}};
  if (!plan.clip_ratio.empty()) json["clip_ratio"] = plan.clip_ratio;
  if (plan.error) json["error"] = error_to_json(*plan.error);
  return json;
}

TensorPlan plan_from_json(const Json& json) {
  TensorPlan plan;
  plan.rotation = rotation_from_json(json.at("rotation"));
  plan.coder = coder_from_json(json);
  check_fields(json, plan.coder);
  if (json.contains("allocation")) plan.allocation = allocation_from_json(json.at("allocation"));
  if (json.contains("centroids")) plan.centroids = centroids_from_json(json.at("centroids"));
  if (json.contains("transform")) {
    const Json& transform = json.at("transform");
    plan.transform = MetricTransform{transform.at("kind"), transform.at("outlier_gain"), transform.at("condition")};
  }
  plan.clip_ratio = json.value("clip_ratio", std::vector<double>{});
  if (json.contains("error")) plan.error = error_from_json(json.at("error"));
  return plan;
}

}  // namespace kvq
