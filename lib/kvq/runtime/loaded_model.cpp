#include <kvq/artifact/artifact.h>
#include <kvq/codec/fold_weights.h>
#include <kvq/core/error.h>
#include <kvq/plan/layer_pages.h>
#include <kvq/runtime/loaded_model.h>

#include <fmt/ranges.h>

#include <cmath>
#include <utility>

namespace kvq {

namespace {

/// Faults of one kind, thrown together.
class Faults {
 public:
  Faults(ErrorKind kind, std::string where) : kind_(kind), where_(std::move(where)) {}
  void add(std::string fault) {
    if (!fault.empty()) faults_.push_back(std::move(fault));
  }
  template <typename T, typename U>
  void expect_equal(const std::string& what, const T& expected, const U& found) {
    if (expected != found) add(fmt::format("{}: expected {}, found {}", what, expected, found));
  }
  void raise() const {
    if (!faults_.empty()) throw Error{kind_, fmt::format("{}: {}", where_, fmt::join(faults_, "; "))};
  }

 private:
  ErrorKind kind_;
  std::string where_;
  std::vector<std::string> faults_;
};

void check_claim(const ModelClaim& c) {
  Faults faults(ErrorKind::usage, "model options");
  if (c.num_layers < 1) faults.add(fmt::format("num_layers: expected 1 or more, found {}", c.num_layers));
  if (c.first_layer < 0 || c.layer_count < 1 || c.layer_count > c.num_layers - c.first_layer)
    faults.add(fmt::format("layers [{}, {}) are not within the model's {}", c.first_layer,
                           std::int64_t{c.first_layer} + c.layer_count, c.num_layers));
  if (c.tp_size < 1 || c.tp_rank < 0 || c.tp_rank >= c.tp_size)
    faults.add(fmt::format("tp_rank {} of tp_size {}: expected a rank below the size", c.tp_rank, c.tp_size));
  if (c.max_step_tokens < 1 || c.max_step_tokens > 65536)
    faults.add(fmt::format("max_step_tokens: expected 1 to 65536, found {}", c.max_step_tokens));
  faults.raise();
}

void check_layer(const LayerPlan& plan, const LayerClaim& claim, Faults& faults) {
  const LayerGeometry& g = plan.geometry;
  const auto expect = [&](const char* what, const auto& expected, const auto& found) {
    faults.expect_equal(fmt::format("layer {}: {}", plan.layer, what), expected, found);
  };
  expect("num_q_heads", claim.num_q_heads, g.num_q_heads);
  expect("num_kv_heads", claim.num_kv_heads, g.num_kv_heads);
  expect("head_dim", claim.head_dim, g.head_dim);
  expect("v_head_dim", claim.v_head_dim, g.v_head_dim);
  expect("sliding_window", claim.sliding_window, g.sliding_window);
  if (claim.rope) expect("rope layout", std::string(to_string(*claim.rope)), std::string(to_string(g.rope.layout)));
  if (claim.rotary_dim) expect("rotary_dim", *claim.rotary_dim, g.rope.dim);
  if (claim.softmax_scale && !(std::abs(*claim.softmax_scale - g.softmax_scale) <= 1e-6 * g.softmax_scale))
    expect("softmax_scale", *claim.softmax_scale, g.softmax_scale);
  if (claim.logit_softcap && !(std::abs(*claim.logit_softcap - g.logit_softcap) <= 1e-6 * g.logit_softcap))
    expect("logit_softcap", *claim.logit_softcap, g.logit_softcap);
  if (claim.folded.k && g.rope.layout != RopeLayout::none)
    faults.add(fmt::format("layer {}: folded k: expected a layer without RoPE, found {}", plan.layer,
                           to_string(g.rope.layout)));
  for (const Side side : kSides)
    if (const TensorPlan* of = plan.side(side);
        of && of->centroids && (side == Side::v ? claim.folded.v : claim.folded.k || claim.folded.k_scales))
      faults.add(fmt::format("layer {}: folded {}: expected a side without centroids, of which each token has another",
                             plan.layer, name(side)));
  if (claim.folded.k_scales) {
    if (claim.folded.k)
      faults.add(fmt::format("layer {}: folded k: expected the rotation or the scales alone, found both", plan.layer));
    if (const std::string fault = key_scale_fault(plan); !fault.empty())
      faults.add(fmt::format("layer {}: folded scales of k: {}", plan.layer, fault));
  }
}

/// The plans of the layers that are served; throws unless all exist and match the model.
std::vector<const LayerPlan*> matching_layers(const Artifact& artifact, const ModelClaim& claim,
                                              const std::string& file) {
  Faults faults(ErrorKind::check_failed,
                file + " is not of this model (expected: the caller's, found: the artifact's)");
  faults.expect_equal("num_layers", claim.num_layers, artifact.model.num_layers);
  if (claim.fingerprint) faults.expect_equal("fingerprint", *claim.fingerprint, artifact.model.fingerprint);
  std::vector<const LayerPlan*> layers;
  std::vector<int> missing;
  for (int layer = claim.first_layer; layer < claim.first_layer + claim.layer_count; ++layer) {
    const LayerPlan* found = nullptr;
    for (const LayerPlan& plan : artifact.layers)
      if (plan.layer == layer) found = &plan;
    if (!found) {
      missing.push_back(layer);
      continue;
    }
    check_layer(*found, claim.layers[static_cast<std::size_t>(layer)], faults);
    layers.push_back(found);
  }
  if (!missing.empty()) faults.add(fmt::format("layers without a plan: {}", fmt::join(missing, ", ")));
  faults.raise();
  return layers;
}

/// Page layouts of all layers, or all reasons why there are none.
std::vector<PageLayout> page_layouts(const std::vector<const LayerPlan*>& layers, const ModelClaim& claim,
                                     const std::string& file) {
  Faults faults(ErrorKind::unsupported, file);
  std::vector<PageLayout> layouts;
  for (const LayerPlan* plan : layers) {
    if (const std::string fault = slice_fault(plan->geometry, claim.tp_size); !fault.empty())
      faults.add(fmt::format("layer {}: {}", plan->layer, fault));
    else if (const std::string joint = joint_fault(*plan, claim.tp_size); !joint.empty())
      faults.add(fmt::format("layer {} {}", plan->layer, joint));
    try {
      layouts.push_back(page_layout_of(*plan, claim.page_size));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unsupported) throw;
      faults.add(error.what());
    }
  }
  faults.raise();
  return layouts;
}

}  // namespace

const LoadedLayer* LoadedModel::find(int layer) const {
  const int i = layer - claim.first_layer;
  return i >= 0 && i < static_cast<int>(layers.size()) ? &layers[static_cast<std::size_t>(i)] : nullptr;
}

LoadedModel load_model(const std::filesystem::path& path, const ModelClaim& claim) {
  check_claim(claim);
  const SafetensorsFile file = SafetensorsFile::open(path);
  const Artifact artifact = load_artifact(file);
  constexpr int kMostWindow = 1 << 20;  // because rows of a window slot, and their bytes, are counted in int
  for (const int tokens : {artifact.windows.sink_tokens, artifact.windows.recent_tokens, claim.max_step_tokens})
    if (tokens > kMostWindow)
      throw Error{ErrorKind::unsupported,
                  fmt::format("{}: windows: expected at most {} tokens, found {}", path.string(), kMostWindow, tokens)};
  const std::vector<const LayerPlan*> plans = matching_layers(artifact, claim, path.string());
  const std::vector<PageLayout> layouts = page_layouts(plans, claim, path.string());

  LoadedModel model{
      .claim = claim,
      .name = artifact.model.name,
      .method = artifact.calibration.method,
      .windows = {},
      .layers = {},
      .image = {},
      .content_hash = stated_hash(file),
  };
  if (!claim.without_windows) model.windows = artifact.windows;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const HeadSlice heads = slice_of(plans[i]->geometry, claim.tp_rank, claim.tp_size);
    LoadedLayer layer{
        .plan = slice(*plans[i], heads),
        .heads = heads,
        .folded = claim.layers[static_cast<std::size_t>(plans[i]->layer)].folded,
        .pages = layouts[i],
        .key = {},
        .windows = {},
        .golden = {},
    };
    layer.pages.num_kv_heads = heads.num_kv;
    layer.key = kernel_key(layer.plan, layer.pages, claim.bf16);
    layer.windows = window_layouts_of(layer.pages, model.windows, claim.max_step_tokens);
    if (const auto golden = artifact.golden.find(plans[i]->layer); golden != artifact.golden.end())
      layer.golden = slice(golden->second, *plans[i], heads);
    model.image.add(layer.plan, layer.folded, claim.bf16, layer.pages, bit_kernels(layer.key));
    model.layers.push_back(std::move(layer));
  }
  return model;
}

}  // namespace kvq
