#include "report/evaluation.h"

#include "common/stable_order.h"
#include "eval_schema_text.h"
#include "report/text.h"

#include <kvq/core/error.h>
#include <kvq/core/text.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <set>

namespace kvq {

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostSchemes = 1024;

[[noreturn]] void refuse(const std::string& where, const std::string& what, const std::string& hint = {}) {
  throw Error{ErrorKind::bad_input, fmt::format("{}: {}", where, what), hint};
}

/// Reads a file after checking that it is a regular file and not too large.
std::string read_text(const std::string& path) {
  const auto fail = [&](const std::string& what) {
    throw Error{ErrorKind::io, fmt::format("{}: cannot {}", path, what)};
  };
  std::error_code failed;
  const fs::file_status status = fs::status(path, failed);
  if (failed) fail("open: " + failed.message());
  if (!fs::is_regular_file(status)) fail("open: not a regular file");
  const std::uintmax_t bytes = fs::file_size(path, failed);
  if (failed) fail("read its size: " + failed.message());
  if (const JsonLimits limits; bytes > limits.max_bytes)
    refuse(path, fmt::format("expected at most {} bytes of JSON, found {}", limits.max_bytes, bytes));
  std::string text(bytes, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(text.data(), static_cast<std::streamsize>(bytes))) fail("read it");
  return text;
}

/// Checks the version before the schema, because the schema would call another version malformed.
void check_version(const Json& document, const std::string& path) {
  if (!document.is_object() || !document.contains("schema_version") || !document["schema_version"].is_string()) return;
  const std::string version = document["schema_version"];
  const std::size_t digits = std::min(version.find_first_not_of("0123456789"), version.size());
  if (digits == 0 || digits == version.size() || version[digits] != '.' || version.substr(0, digits) == "1") return;
  throw Error{ErrorKind::unsupported,
              fmt::format("{}: expected kvq-eval version 1.x, found {}", path, printable(version, 20)),
              "evaluate again with this kvq"};
}

void check_model(const Json& dump, const std::string& path, const NamedArtifact& artifact) {
  const ModelGeometry& model = artifact.artifact.model;
  const std::string name = dump.at("model"), fingerprint = dump.at("fingerprint");
  const bool same =
      model.fingerprint.empty() || fingerprint.empty() ? name == model.name : fingerprint == model.fingerprint;
  const auto text = [](const std::string& label, const std::string& hash) {
    return fmt::format("{} ({})", printable(label, 40), hash.empty() ? "no fingerprint" : printable(hash, 12));
  };
  if (!same)
    refuse(path, fmt::format("expected an evaluation of {} as in {}, found {}", text(model.name, model.fingerprint),
                             artifact.path, text(name, fingerprint)));
}

/// Throws unless the document has the artifact's layers, because means over other layers do not compare.
void check_layers(const Json& scheme, const std::string& where, const NamedArtifact& artifact) {
  const std::vector<LayerPlan>& plans = artifact.artifact.layers;
  const Json& layers = scheme.at("layers");
  if (layers.size() != plans.size())
    refuse(where, fmt::format("expected {} layers as in {}, found {}", plans.size(), artifact.path, layers.size()),
           "evaluate the layers that the artifact has");
  for (std::size_t i = 0; i < plans.size(); ++i) {
    if (layers[i].at("index") != plans[i].layer)
      refuse(where, fmt::format("expected layer {} as in {}, found {}", plans[i].layer, artifact.path,
                                layers[i].at("index").dump()));
    const std::size_t heads = layers[i].at("heads").size();
    if (std::cmp_not_equal(heads, plans[i].geometry.num_kv_heads))
      refuse(where, fmt::format("layer {}: expected {} KV heads as in {}, found {}", plans[i].layer,
                                plans[i].geometry.num_kv_heads, artifact.path, heads));
  }
}

Json read_document(const std::string& path, const NamedArtifact& artifact) {
  static const Json schema = parse_json(schema::eval, "eval.schema.json");
  Json document = parse_json(read_text(path), path);
  check_version(document, path);
  check_schema(document, schema, path);
  check_model(document["dump"], path, artifact);
  const Json& schemes = document["schemes"];
  for (std::size_t s = 0; s < schemes.size(); ++s)
    check_layers(schemes[s], fmt::format("{}: schemes/{}", path, s), artifact);
  return document;
}

/// Appends " (2)", " (3)" ... until `taken` does not have the name.
std::string unique_name(const std::string& wanted, std::set<std::string>& taken) {
  std::string name = wanted;
  for (int number = 2; !taken.insert(name).second; ++number) name = fmt::format("{} ({})", wanted, number);
  return name;
}

/// Mean code bits of the keys over all elements, as kvq-eval computes it.
double mean_k_bits(const Artifact& artifact) {
  double bits = 0.0, elements = 0.0;
  for (const LayerPlan& layer : artifact.layers) {
    const double own = static_cast<double>(layer.geometry.num_kv_heads) * layer.geometry.head_dim;
    bits += own * mean_code_bits(layer.k);
    elements += own;
  }
  return bits / elements;
}

bool is_own(const Json& scheme, const NamedArtifact& artifact) {
  return scheme.contains("path") &&
         fs::path(scheme["path"].get<std::string>()).filename() == fs::path(artifact.path).filename() &&
         scheme.value("method", "") == artifact.artifact.calibration.method &&
         std::abs(scheme["k_code_bits"].get<double>() - mean_k_bits(artifact.artifact)) < 1e-6;
}

}  // namespace

std::vector<Evaluation> read_evaluations(const std::vector<std::string>& paths, const NamedArtifact& artifact) {
  std::vector<Evaluation> evaluations;
  std::set<std::string> names;
  std::size_t schemes = 0;
  for (const std::string& path : paths) {
    const fs::path file(path);
    evaluations.push_back({readable(file.filename().string()), unique_name(readable(file.stem().string()), names),
                           read_document(path, artifact)});
    schemes += evaluations.back().document["schemes"].size();
    if (schemes > kMostSchemes)
      refuse(path, fmt::format("expected at most {} schemes in all documents, found {}", kMostSchemes, schemes));
  }
  return evaluations;
}

std::vector<EvaluatedScheme> schemes_of(const std::vector<Evaluation>& evaluations, const NamedArtifact& artifact) {
  std::map<std::string, std::set<const Evaluation*>> holders;
  for (const Evaluation& evaluation : evaluations)
    for (const Json& scheme : evaluation.document["schemes"])
      holders[readable(scheme["name"].get<std::string>())].insert(&evaluation);
  std::vector<EvaluatedScheme> schemes;
  std::set<std::string> taken;
  for (const Evaluation& evaluation : evaluations) {
    for (const Json& scheme : evaluation.document["schemes"]) {
      const std::string name = readable(scheme["name"].get<std::string>());
      schemes.push_back({unique_name(holders[name].size() > 1 ? evaluation.name + ": " + name : name, taken),
                         &evaluation, &scheme, is_own(scheme, artifact)});
    }
  }
  sort_stably(schemes, [](const EvaluatedScheme& a, const EvaluatedScheme& b) { return a.own && !b.own; });
  return schemes;
}

double metric_of(const Json& part, std::string_view metric) {
  const Json* here = &part;
  while (!metric.empty()) {
    const std::string_view step = metric.substr(0, metric.find('/'));
    const auto found = here->is_object() ? here->find(std::string(step)) : here->end();
    if (found == here->end()) return std::numeric_limits<double>::quiet_NaN();
    here = &*found;
    metric.remove_prefix(std::min(metric.size(), step.size() + 1));
  }
  return here->is_number() ? here->get<double>() : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace kvq
