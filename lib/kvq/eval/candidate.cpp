#include <kvq/core/error.h>
#include <kvq/core/text.h>
#include <kvq/eval/candidate.h>

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>

namespace kvq {

namespace {

const LayerPlan* find_layer(const Artifact& artifact, int layer) {
  const auto it = std::find_if(artifact.layers.begin(), artifact.layers.end(),
                               [&](const LayerPlan& plan) { return plan.layer == layer; });
  return it == artifact.layers.end() ? nullptr : &*it;
}

[[noreturn]] void refuse(const std::string& who, const std::string& what, const std::string& hint = {}) {
  throw Error{ErrorKind::bad_input, fmt::format("{}{}{}", who, who.empty() ? "" : ": ", what), hint};
}

template <typename T>
void expect_same(const std::string& who, int layer, const char* what, const T& own, const T& in_dump) {
  if (own != in_dump) refuse(who, fmt::format("layer {} {}: {}, but the dump has {}", layer, what, own, in_dump));
}

/// Compares the facts that storing a layer depends on. Softmax scale and sliding window are not compared, because
/// evaluation takes both from the dump.
void check_geometry(const std::string& who, int layer, const LayerGeometry& a, const LayerGeometry& d) {
  expect_same(who, layer, "num_q_heads", a.num_q_heads, d.num_q_heads);
  expect_same(who, layer, "num_kv_heads", a.num_kv_heads, d.num_kv_heads);
  expect_same(who, layer, "head_dim", a.head_dim, d.head_dim);
  expect_same(who, layer, "v_head_dim", a.v_head_dim, d.v_head_dim);
  expect_same<std::string>(who, layer, "kind", to_string(a.kind), to_string(d.kind));
  expect_same<std::string>(who, layer, "rope layout", to_string(a.rope.layout), to_string(d.rope.layout));
  expect_same(who, layer, "rotary_dim", a.rope.dim, d.rope.dim);
  expect_same(who, layer, "rotary_offset", a.rope.offset, d.rope.offset);
  expect_same(who, layer, "rope_attention_factor", a.rope.attention_factor, d.rope.attention_factor);
  for (std::size_t j = 0; j < a.rope.inv_freq.size(); ++j)
    expect_same(who, layer, fmt::format("rope_inv_freq[{}]", j).c_str(), a.rope.inv_freq[j], d.rope.inv_freq[j]);
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

void number_equal_names(std::vector<Candidate>& candidates) {
  std::set<std::string> taken;
  for (Candidate& candidate : candidates) {
    const std::string wanted = candidate.name;
    for (int number = 2; !taken.insert(candidate.name).second; ++number)
      candidate.name = fmt::format("{} ({})", wanted, number);
  }
}

std::vector<Candidate> load_candidates(const std::vector<std::string>& paths, const std::vector<std::string>& schemes) {
  const auto stem = [](const std::string& path) { return std::filesystem::path(path).stem().string(); };
  std::vector<Candidate> candidates;
  for (const std::string& path : paths) {
    const bool unique = std::count_if(paths.begin(), paths.end(),
                                      [&](const std::string& other) { return stem(other) == stem(path); }) == 1;
    Artifact artifact = load_artifact(path);
    std::string method = artifact.calibration.method;
    candidates.push_back({
        .name = unique ? stem(path) : path,
        .path = path,
        .method = std::move(method),
        .temporary = false,
        .artifact = std::move(artifact),
        .scheme = {},
    });
  }
  for (const std::string& name : schemes)
    candidates.push_back(
        {.name = name, .path = {}, .method = {}, .temporary = false, .artifact = {}, .scheme = find_scheme(name)});
  number_equal_names(candidates);
  return candidates;
}

void check_same_model(const std::string& who, const ModelGeometry& own, const ModelGeometry& model,
                      const std::vector<int>& layers) {
  if (!own.fingerprint.empty() && !model.fingerprint.empty() && own.fingerprint != model.fingerprint)
    refuse(who,
           fmt::format("of another model ({}, fingerprint {}; the dump: {}, {})", printable(own.name, 40),
                       printable(own.fingerprint, 12), printable(model.name, 40), printable(model.fingerprint, 12)));
  if (own.num_layers != model.num_layers)
    refuse(who, fmt::format("of a model of {} layers, but the dump's has {}", own.num_layers, model.num_layers));
  for (const LayerEntry& entry : model.layers) {
    if (!std::binary_search(layers.begin(), layers.end(), entry.layer)) continue;
    const auto it = std::find_if(own.layers.begin(), own.layers.end(),
                                 [&](const LayerEntry& other) { return other.layer == entry.layer; });
    if (it == own.layers.end())
      refuse(who, fmt::format("has no layer {}, but the dump has", entry.layer),
             "--layers names the layers to compare");
    check_geometry(who, entry.layer, it->geometry, entry.geometry);
    expect_same<std::string>(who, entry.layer, "values", it->has_values ? "there" : "none",
                             entry.has_values ? "there" : "none");
  }
}

void check_model(const Candidate& candidate, const ModelGeometry& model, const std::vector<int>& layers) {
  ModelGeometry own = candidate.artifact->model;
  own.layers.clear();
  for (const LayerPlan& plan : candidate.artifact->layers)
    own.layers.push_back({.layer = plan.layer, .geometry = plan.geometry, .has_values = plan.v.has_value()});
  const std::string who =
      candidate.temporary ? fmt::format("row \"{}\"", printable(candidate.name, 80)) : candidate.path;
  check_same_model(who, own, model, layers);
}

}  // namespace kvq
