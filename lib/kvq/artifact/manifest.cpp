#include <kvq/artifact/manifest.h>
#include <kvq/core/error.h>

namespace kvq {

namespace {

struct CoderToJson {
  Json& json;
  void operator()(const ExactCoder&) const {
    json["coder"] = "exact";
    json["bits"] = 16;
  }
  void operator()(const UniformCoder& coder) const {
    json["coder"] = to_string(coder.levels);
    json["bits"] = coder.bits;
    json["group_size"] = coder.group_size;
    json["scale_type"] = to_string(coder.scale_type);
    json["scale_rule"] = to_string(coder.rule);
    if (coder.levels == UniformLevels::affine) json["zero"] = to_string(coder.zero);
  }
};

Json rotation_to_json(const Rotation& rotation) {
  Json json = {{"kind", to_string(rotation.kind)}, {"scope", to_string(rotation.scope)}, {"recipe", rotation.recipe},
               {"signs", !rotation.signs.empty()}, {"eigenbasis", !rotation.eigenbasis.empty()}};
  if (rotation.order > 0) json["order"] = rotation.order;
  if (!rotation.target.empty()) json["target"] = rotation.target;
  if (!rotation.sign_choice.empty()) json["sign_choice"] = rotation.sign_choice;
  return json;
}

Rotation rotation_from_json(const Json& json) {
  Rotation rotation;
  const std::string kind = json.at("kind");
  rotation.kind = kind == "dense" ? RotationKind::dense : kind == "block_hadamard" ? RotationKind::block_hadamard : RotationKind::identity;
  rotation.scope = json.at("scope") == "layer" ? Scope::layer : Scope::kv_head;
  rotation.recipe = json.at("recipe");
  rotation.order = json.value("order", 0);
  rotation.target = json.value("target", "");
  rotation.sign_choice = json.value("sign_choice", std::vector<std::string>{});
  return rotation;
}

template <typename Enum, std::size_t N>
Enum enum_from(const std::string& name, const Enum (&values)[N]) {
  for (const Enum value : values)
    if (name == to_string(value)) return value;
  throw Error{ErrorKind::bad_input, fmt::format("unknown word \"{}\" in a plan", name)};
}

Coder coder_from_json(const Json& json) {
  if (json.at("coder") == "exact") return ExactCoder{};
  UniformCoder coder;
  coder.levels = enum_from(json.at("coder"), {UniformLevels::affine, UniformLevels::symmetric});
  coder.bits = json.at("bits");
  coder.group_size = json.at("group_size");
  coder.scale_type = enum_from(json.at("scale_type"), {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32});
  coder.rule = enum_from(json.at("scale_rule"), {ScaleRule::minmax, ScaleRule::absmax, ScaleRule::least_squares, ScaleRule::norm});
  if (coder.levels == UniformLevels::affine) {
    if (!json.contains("zero")) throw Error{ErrorKind::bad_input, "coder affine without \"zero\""};
    coder.zero = enum_from(json.at("zero"), {ZeroKind::floating, ZeroKind::integer});
  }
  return coder;
}

}  // namespace

Json plan_to_json(const TensorPlan& plan) {
  Json json = {{"center", !plan.center.empty()}, {"rotation", rotation_to_json(plan.rotation)}};
  std::visit(CoderToJson{json}, plan.coder);
  if (!plan.clip_ratio.empty()) json["clip_ratio"] = plan.clip_ratio;
  if (plan.error) json["error"] = {{"metric", plan.error->metric}, {"before", plan.error->before}, {"after", plan.error->after}};
  return json;
}

TensorPlan plan_from_json(const Json& json) {
  TensorPlan plan;
  plan.rotation = rotation_from_json(json.at("rotation"));
  plan.coder = coder_from_json(json);
  plan.clip_ratio = json.value("clip_ratio", std::vector<double>{});
  if (json.contains("error")) {
    const Json& error = json.at("error");
    plan.error = FitError{error.at("metric"), error.at("before"), error.at("after")};
  }
  return plan;
}

}  // namespace kvq
