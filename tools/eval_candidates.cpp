#include "eval_candidates.h"

#include <kvq/core/error.h>
#include <kvq/core/text.h>

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

namespace kvq {

namespace {

const LayerPlan* find_layer(const Artifact& artifact, int layer) {
  const auto it = std::find_if(artifact.layers.begin(), artifact.layers.end(), [&](const LayerPlan& plan) { return plan.layer == layer; });
  return it == artifact.layers.end() ? nullptr : &*it;
}

[[noreturn]] void refuse(const Candidate& candidate, const std::string& what, const std::string& hint = {}) {
  throw Error{ErrorKind::bad_input, fmt::format("{}: {}", candidate.temporary ? fmt::format("row \"{}\"", printable(candidate.name, 80)) : candidate.path, what), hint};
}

template <typename T>
void expect_same(const Candidate& candidate, int layer, const char* what, const T& in_artifact, const T& in_dump) {
  if (in_artifact != in_dump) refuse(candidate, fmt::format("layer {} {}: {}, but the dump has {}", layer, what, in_artifact, in_dump));
}

/// What storing a layer rests on. Softmax scale and sliding window are the dump's, whatever the artifact says.
void check_geometry(const Candidate& candidate, int layer, const LayerGeometry& a, const LayerGeometry& d) {
  expect_same(candidate, layer, "num_q_heads", a.num_q_heads, d.num_q_heads);
  expect_same(candidate, layer, "num_kv_heads", a.num_kv_heads, d.num_kv_heads);
  expect_same(candidate, layer, "head_dim", a.head_dim, d.head_dim);
  expect_same(candidate, layer, "v_head_dim", a.v_head_dim, d.v_head_dim);
  expect_same<std::string>(candidate, layer, "kind", to_string(a.kind), to_string(d.kind));
  expect_same<std::string>(candidate, layer, "rope layout", to_string(a.rope.layout), to_string(d.rope.layout));
  expect_same(candidate, layer, "rotary_dim", a.rope.dim, d.rope.dim);
  expect_same(candidate, layer, "rotary_offset", a.rope.offset, d.rope.offset);
  expect_same(candidate, layer, "rope_attention_factor", a.rope.attention_factor, d.rope.attention_factor);
  for (std::size_t j = 0; j < a.rope.inv_freq.size(); ++j)
    expect_same(candidate, layer, fmt::format("rope_inv_freq[{}]", j).c_str(), a.rope.inv_freq[j], d.rope.inv_freq[j]);
}

}  // namespace

StoredLayer Candidate::of_layer(const LayerGeometry& geometry, int layer, std::uint64_t seed, bool with_windows) const {
  if (scheme) return scheme->of_layer(geometry, layer, seed, with_windows);
  const LayerPlan* plan = find_layer(*artifact, layer);
  KVQ_ASSERT(plan != nullptr);
  const Windows windows = with_windows ? artifact->windows : Windows{};
  StoredLayer stored{stored_by_plan(plan->k, geometry.head_dim, windows), nullptr};
  if (plan->v) stored.v = stored_by_plan(*plan->v, geometry.v_head_dim, windows);
  return stored;
}

std::vector<Candidate> load_candidates(const std::vector<std::string>& paths, const std::vector<std::string>& schemes) {
  if (paths.empty() && schemes.empty()) throw Error{ErrorKind::usage, "an artifact or --scheme is needed", "see kvq-eval --help"};
  const auto stem = [](const std::string& path) { return std::filesystem::path(path).stem().string(); };
  std::vector<Candidate> candidates;
  for (const std::string& path : paths) {
    const bool unique = std::count_if(paths.begin(), paths.end(), [&](const std::string& other) { return stem(other) == stem(path); }) == 1;
    Artifact artifact = load_artifact(path);
    std::string method = artifact.calibration.method;
    candidates.push_back({.name = unique ? stem(path) : path, .path = path, .method = std::move(method), .temporary = false, .artifact = std::move(artifact), .scheme = {}});
  }
  for (const std::string& name : schemes) candidates.push_back({.name = name, .path = {}, .method = {}, .temporary = false, .artifact = {}, .scheme = find_scheme(name)});
  return candidates;
}

void check_model(const Candidate& candidate, const ModelGeometry& model, const std::vector<int>& layers) {
  const ModelGeometry& own = candidate.artifact->model;
  if (!own.fingerprint.empty() && !model.fingerprint.empty() && own.fingerprint != model.fingerprint)
    refuse(candidate, fmt::format("of another model ({}, fingerprint {}; the dump: {}, {})", printable(own.name, 40), printable(own.fingerprint, 12),
                                  printable(model.name, 40), printable(model.fingerprint, 12)));
  if (own.num_layers != model.num_layers) refuse(candidate, fmt::format("of a model of {} layers, but the dump's has {}", own.num_layers, model.num_layers));
  for (const LayerEntry& entry : model.layers) {
    if (!std::binary_search(layers.begin(), layers.end(), entry.layer)) continue;
    const LayerPlan* plan = find_layer(*candidate.artifact, entry.layer);
    if (plan == nullptr) refuse(candidate, fmt::format("has no layer {}, but the dump has", entry.layer), "--layers names the layers to compare");
    check_geometry(candidate, entry.layer, plan->geometry, entry.geometry);
    expect_same<std::string>(candidate, entry.layer, "values", plan->v ? "planned" : "none", entry.has_values ? "planned" : "none");
  }
}

}  // namespace kvq
