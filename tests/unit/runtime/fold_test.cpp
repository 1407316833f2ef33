#include <kvq/codec/fold_weights.h>
#include <kvq/runtime.hpp>

#include "support/random_data.h"
#include "support/served_artifact.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

using namespace kvq;
using Catch::Matchers::Contains;

namespace {

constexpr int kHidden = 24, kDim = 128, kKvHeads = 4, kQHeads = 16;

std::vector<double> random(std::size_t count, std::uint64_t seed) {
  const std::vector<float> x = test::gaussian(count, seed);
  return {x.begin(), x.end()};
}

/// Weights of a layer, or of the heads of one rank.
struct Weights {
  std::vector<double> v, v_bias, o, o_bias;
  explicit Weights(int kv_heads = kKvHeads, int q_heads = kQHeads)
      : v(random(static_cast<std::size_t>(kv_heads * kDim * kHidden), 1)),
        v_bias(random(static_cast<std::size_t>(kv_heads * kDim), 2)),
        o(random(static_cast<std::size_t>(kHidden * q_heads * kDim), 3)),
        o_bias(random(kHidden, 4)) {}
  bool operator==(const Weights&) const = default;

  kvq_fold_values_args args(bool biases = true) {
    auto a = runtime::init<kvq_fold_values_args>();
    a.hidden = kHidden, a.v_weight = v.data(), a.o_weight = o.data();
    if (biases) a.v_bias = v_bias.data(), a.o_bias = o_bias.data();
    return a;
  }
};

struct Served {
  explicit Served(Artifact made = test::served_artifact({}, 0))
      : artifact(std::move(made)), path((folder / "served.safetensors").string()) {
    save_artifact(artifact, path);
  }
  runtime::Model load(int tp_rank = 0, int tp_size = 1) const {
    std::vector<kvq_layer_geometry> geometry;
    for (const LayerPlan& plan : artifact.layers) {
      auto g = runtime::init<kvq_layer_geometry>();
      g.num_q_heads = kQHeads, g.num_kv_heads = kKvHeads, g.head_dim = kDim;
      g.sliding_window = plan.geometry.sliding_window;
      geometry.push_back(g);
    }
    auto options = runtime::init<kvq_model_options>();
    options.num_layers = options.num_geometries = static_cast<std::int32_t>(geometry.size());
    options.geometry = geometry.data(), options.tp_rank = tp_rank, options.tp_size = tp_size;
    return runtime::Model(path, options);
  }

  test::TempFolder folder;
  Artifact artifact;
  std::string path;
};

}  // namespace

TEST_CASE("Values are folded through the interface as the codec folds them", "[runtime]") {
  const Served served;
  const runtime::Model model = served.load();
  for (const int layer : {0, 1, 2, 3, 4}) {
    CAPTURE(layer);
    for (const auto& [type, dtype] : {std::pair{KVQ_WEIGHT_BF16, DType::bf16}, std::pair{KVQ_WEIGHT_FP16, DType::f16},
                                      std::pair{KVQ_WEIGHT_FP32, DType::f32}}) {
      Weights mine, theirs;
      kvq_fold_values_args args = mine.args();
      args.weight_type = type;
      const kvq_fold_error error = model.fold_values(layer, args);
      const FoldError expected = fold_value_rotation(served.artifact.layers[static_cast<std::size_t>(layer)], kHidden,
                                                     dtype, {theirs.v, theirs.v_bias}, {theirs.o, theirs.o_bias});
      CHECK((mine == theirs));
      CHECK((layer == 3) == (mine == Weights()));  // the exact layer has no rotation
      CHECK(error.v_proj == expected.v_proj);
      CHECK(error.v_proj_before == expected.v_proj_before);
      CHECK(error.o_proj == expected.o_proj);
      CHECK(error.o_proj_before == expected.o_proj_before);
      CHECK(error.v_proj < (type == KVQ_WEIGHT_BF16 ? 0x1p-8 : type == KVQ_WEIGHT_FP16 ? 0x1p-11 : 0x1p-24));
      CHECK((error.v_proj > 0.0) ==
            !(layer == 3 && type == KVQ_WEIGHT_FP32));  // folding into float weights is exact where nothing is rotated
    }
  }
}

TEST_CASE("A rank folds the weights of its heads, and ranks' biases add up", "[runtime]") {
  const Served served;
  Weights whole;
  served.load().fold_values(0, whole.args());
  for (const int size : {2, 8}) {
    std::vector<double> o_bias(kHidden, 0.0);
    for (int rank = 0; rank < size; ++rank) {
      CAPTURE(size, rank);
      const runtime::Model model = served.load(rank, size);
      const kvq_layer_info info = model.layer(0);
      const Weights all;
      Weights part(info.num_kv_heads, info.num_q_heads);
      const auto rows = [&](const std::vector<double>& from, int width, int first, int count) {
        const auto at = from.begin() + static_cast<std::ptrdiff_t>(first) * kDim * width;
        return std::vector<double>(at, at + static_cast<std::ptrdiff_t>(count) * kDim * width);
      };
      const auto columns = [&](const std::vector<double>& from) {
        std::vector<double> cut;
        for (int o = 0; o < kHidden; ++o) {
          const auto at = from.begin() + (o * kQHeads + info.first_q_head) * kDim;
          cut.insert(cut.end(), at, at + info.num_q_heads * kDim);
        }
        return cut;
      };
      part.v = rows(all.v, kHidden, info.first_kv_head, info.num_kv_heads);
      part.v_bias = rows(all.v_bias, 1, info.first_kv_head, info.num_kv_heads);
      part.o = columns(all.o);
      if (rank > 0) part.o_bias.assign(kHidden, 0.0);
      model.fold_values(0, part.args());
      CHECK((part.v == rows(whole.v, kHidden, info.first_kv_head, info.num_kv_heads)));
      CHECK((part.v_bias == rows(whole.v_bias, 1, info.first_kv_head, info.num_kv_heads)));
      CHECK((part.o == columns(whole.o)));
      for (std::size_t i = 0; i < o_bias.size(); ++i) o_bias[i] += part.o_bias[i];
    }
    for (std::size_t i = 0; i < o_bias.size(); ++i) CHECK(std::abs(o_bias[i] - whole.o_bias[i]) < 1e-11);
  }
}

TEST_CASE("What cannot be folded is refused with the reason, and weights stay", "[runtime]") {
  const Served served;
  const runtime::Model model = served.load();
  auto error = runtime::init<kvq_error>();
  const auto refused = [&](kvq_status expected, int layer, auto change) {
    Weights weights;
    kvq_fold_values_args args = weights.args();
    auto result = runtime::init<kvq_fold_error>();
    change(args, result);
    CHECK(kvq_fold_values(model.get(), layer, &args, &result, &error) == expected);
    CHECK((weights == Weights()));
    return std::string(error.message);
  };
  CHECK_THAT(refused(KVQ_UNSUPPORTED, 0, [](auto& a, auto&) { a.v_bias = nullptr; }),
             Contains("a center needs biases"));
  CHECK_THAT(refused(KVQ_UNSUPPORTED, 0, [](auto& a, auto&) { a.o_bias = nullptr; }),
             Contains("a center needs biases"));
  CHECK_THAT(refused(KVQ_INVALID_ARGUMENT, 1, [](auto& a, auto&) { a.hidden = 0; }),
             Contains("hidden: expected 1 to 16777216, found 0"));
  CHECK_THAT(refused(KVQ_INVALID_ARGUMENT, 1, [](auto& a, auto&) { a.weight_type = 3; }), Contains("weight_type"));
  CHECK_THAT(refused(KVQ_INVALID_ARGUMENT, 1, [](auto& a, auto&) { a.o_weight = nullptr; }),
             Contains("args.o_weight must not be null"));
  CHECK_THAT(refused(KVQ_INVALID_ARGUMENT, 1, [](auto& a, auto&) { a.struct_size = 8; }), Contains("use KVQ_INIT"));
  CHECK_THAT(refused(KVQ_INVALID_ARGUMENT, 1, [](auto&, auto& r) { r.struct_size = 8; }), Contains("use KVQ_INIT"));
  CHECK_THAT(refused(KVQ_INVALID_ARGUMENT, 6, [](auto&, auto&) {}), Contains("layer: expected 0 to 5, found 6"));
  Weights weights;
  const kvq_fold_values_args args = weights.args(false);
  CHECK(kvq_fold_values(model.get(), 1, &args, nullptr, &error) == KVQ_OK);  // no center, no biases, no result
}

TEST_CASE("Scales of keys are folded through the interface as the codec folds them", "[runtime]") {
  const Served served(test::transformed_artifact({}, 0));
  const runtime::Model model = served.load();
  std::vector<double> q = random(kQHeads * kDim * kHidden, 1), k = random(kKvHeads * kDim * kHidden, 2), q_there = q,
                      k_there = k, q_norm = random(kDim, 3), k_norm = random(kDim, 4);
  const std::vector<double> q_before = q;
  auto args = runtime::init<kvq_fold_key_scales_args>();
  args.hidden = kHidden, args.q_weight = q.data(), args.k_weight = k.data();
  model.fold_key_scales(0, args);
  fold_key_scales(served.artifact.layers[0], kHidden, {q_there, {}}, {k_there, {}});
  CHECK((q == q_there && k == k_there));
  CHECK_FALSE((q == q_before));

  auto error = runtime::init<kvq_error>();
  args.q_norm = q_norm.data();
  CHECK(kvq_fold_key_scales(model.get(), 2, &args, &error) == KVQ_INVALID_ARGUMENT);
  CHECK_THAT(error.message, Contains("projections or norms, found both"));
  args.q_weight = args.k_weight = nullptr;
  CHECK(kvq_fold_key_scales(model.get(), 2, &args, &error) == KVQ_INVALID_ARGUMENT);
  CHECK_THAT(error.message, Contains("args.k_norm must not be null"));
  args.k_norm = k_norm.data();
  CHECK(kvq_fold_key_scales(model.get(), 0, &args, &error) == KVQ_UNSUPPORTED);  // heads differ
  CHECK_THAT(error.message, Contains("KV heads 0 and 1 differ"));
  CHECK(kvq_fold_key_scales(model.get(), 3, &args, &error) == KVQ_UNSUPPORTED);
  CHECK_THAT(error.message, Contains("no channel_scale"));
  const std::vector<double> before = k_norm;
  model.fold_key_scales(2, args);
  for (std::size_t i = 0; i < before.size(); ++i)
    CHECK(k_norm[i] == before[i] * static_cast<double>(served.artifact.layers[2].k.rotation.channel_scale[i]));
}

TEST_CASE("Weights that hold scales of keys are claimed where there are some", "[runtime]") {
  const auto refusal = [](Artifact artifact, std::uint32_t fold) {
    artifact.layers.resize(1), artifact.model.num_layers = 1;
    const Served served(artifact);
    auto geometry = runtime::init<kvq_layer_geometry>();
    geometry.num_q_heads = kQHeads, geometry.num_kv_heads = kKvHeads, geometry.head_dim = kDim, geometry.fold = fold;
    auto options = runtime::init<kvq_model_options>();
    options.num_layers = options.num_geometries = 1, options.geometry = &geometry;
    kvq_model* model = nullptr;
    auto error = runtime::init<kvq_error>();
    const kvq_status status = kvq_model_load(served.path.c_str(), &options, &model, &error);
    kvq_model_destroy(model);
    return std::pair{status, std::string(error.message)};
  };
  CHECK(refusal(test::transformed_artifact({}, 0), KVQ_FOLD_K_SCALES).first == KVQ_OK);
  const auto [none, no_scales] = refusal(test::served_artifact({}, 0), KVQ_FOLD_K_SCALES);
  CHECK(none == KVQ_MISMATCH);
  CHECK_THAT(no_scales, Contains("layer 0: folded scales of k: k: no channel_scale"));
  Artifact mixed = test::transformed_artifact({}, 0);
  mixed.layers[0].k.rotation.channel_scale[3] *= 4.0f;
  CHECK_THAT(refusal(mixed, KVQ_FOLD_K_SCALES).second, Contains("of channel 67 of head 0"));
  mixed = test::transformed_artifact({}, 0);
  mixed.layers[0].geometry.rope = {.layout = RopeLayout::none};
  CHECK_THAT(refusal(mixed, KVQ_FOLD_K | KVQ_FOLD_K_SCALES).second, Contains("found both"));
}

TEST_CASE("Keys are folded only where no RoPE lies between", "[runtime]") {
  Artifact artifact = test::served_artifact({}, 0);
  artifact.layers[4].geometry.rope = {.layout = RopeLayout::none};
  const Served served(artifact);
  const runtime::Model model = served.load();
  std::vector<double> q = random(kQHeads * kDim * kHidden, 1), k = random(kKvHeads * kDim * kHidden, 2), q_there = q,
                      k_there = k;
  const std::vector<double> q_before = q, k_before = k;
  auto args = runtime::init<kvq_fold_keys_args>();
  args.hidden = kHidden, args.q_weight = q.data(), args.k_weight = k.data();
  auto error = runtime::init<kvq_error>();
  CHECK(kvq_fold_keys(model.get(), 1, &args, &error) == KVQ_UNSUPPORTED);
  CHECK_THAT(error.message, Contains("keys are rotated after RoPE"));
  CHECK((q == q_before && k == k_before));
  model.fold_keys(4, args);
  fold_key_rotation(artifact.layers[4], kHidden, {q_there, {}}, {k_there, {}});
  CHECK((q == q_there && k == k_there));
  CHECK_FALSE((q == q_before));
  args.q_weight = nullptr;
  CHECK(kvq_fold_keys(model.get(), 4, &args, &error) == KVQ_INVALID_ARGUMENT);
  CHECK_THAT(error.message, Contains("args.q_weight must not be null"));
}
