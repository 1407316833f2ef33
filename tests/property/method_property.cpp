#include <kvq/artifact/artifact.h>
#include <kvq/artifact/verify.h>
#include <kvq/methods/option_table.h>
#include <kvq/solve/spectral.h>

#include "support/artifacts.h"
#include "support/container_edit.h"
#include "support/decide.h"
#include "support/temp_folder.h"

#include <rapidcheck/catch.h>
#include <catch2/catch.hpp>

using namespace kvq;

namespace {

/// Random options that no check refuses; every axis varies.
Options any_options(bool has_values) {
  const auto names = [] {
    std::vector<std::string> all;
    for (const Method& method : methods())
      if (method.name != "kvq")
        all.push_back(method.name);  // tests/cli tests kvq, which decides all layers by one budget
    return all;
  }();
  Options options = test::options_of(*rc::gen::elementOf(names));
  for (SideOptions* side : {&options.k, &options.v}) {
    side->bits = *rc::gen::element(1, 2, 3, 4, 8, 16);
    side->center = *rc::gen::arbitrary<bool>();
    side->scale_type = *rc::gen::element(ScaleType::fp16, ScaleType::bf16, ScaleType::fp32);
    side->zero = *rc::gen::element(ZeroKind::floating, ZeroKind::integer);
    side->clip = *rc::gen::element<std::optional<double>>(std::nullopt, 1.0, 0.92);
    side->transform = *rc::gen::element(TransformKind::orthogonal, TransformKind::diagonal, TransformKind::balanced);
    if (side->allocate == Allocate::rope_block && side->transform == TransformKind::balanced)
      side->transform = TransformKind::diagonal;
    if (side->coder != CoderKind::affine) side->clip = 1.0;
    if (*rc::gen::arbitrary<bool>()) continue;
    side->coder = CoderKind::symmetric;
    side->rule = *rc::gen::element(ScaleRule::absmax, ScaleRule::least_squares, ScaleRule::norm);
    side->clip = 1.0;
  }
  if (!has_values) options.v = test::options_of(options.method).v;
  options.scope = *rc::gen::element(Scope::kv_head, Scope::layer);
  options.seed = *rc::gen::arbitrary<std::uint32_t>();
  options.sign_search = *rc::gen::inRange(0, 3);
  options.random_signs = *rc::gen::arbitrary<bool>();
  const std::size_t composition = *rc::gen::inRange<std::size_t>(0, compositions().size());
  options.composition = compositions()[composition].id;
  check_options(options);
  return options;
}

}  // namespace

TEST_CASE("Whatever is asked of a method, its plan is valid, orthogonal and survives the artifact",
          "[methods][property]") {
  rc::prop("any options, any shape", [] {
    const bool has_values = *rc::gen::inRange(0, 4) != 0;
    const LayerActivations layer = test::make_layer({
        .layer = 2,
        .num_q_heads = 4,
        .num_kv_heads = has_values ? *rc::gen::element(1, 2, 4) : 1,  // kind mla_rope has one
        .head_dim = *rc::gen::element(16, 24, 32, 40),
        .v_head_dim = *rc::gen::element(16, 24, 32, 40),
        .lengths = {23, 8},
        .has_values = has_values,
        .seed = *rc::gen::inRange<std::uint64_t>(0, 1000),
        .outliers = *rc::gen::arbitrary<bool>(),
    });
    const Options options = any_options(has_values);
    Artifact artifact = test::example_artifact();
    artifact.layers = {test::decide_one(layer, options, 20)};
    artifact.calibration.method = options.method;
    artifact.calibration.options = options_to_json(options);
    validate(artifact.layers[0]);
    RC_ASSERT(orthogonality_error(artifact.layers[0].k.rotation, layer.geometry.head_dim) < 1e-6);

    const test::TempFolder folder;
    save_artifact(artifact, folder / "a");
    const Artifact back = load_artifact(folder / "a");
    save_artifact(back, folder / "b");
    RC_ASSERT(test::file_bytes(folder / "a") == test::file_bytes(folder / "b"));
    RC_ASSERT(back.layers[0].k.rotation.matrix == artifact.layers[0].k.rotation.matrix);
    std::string faults;
    for (const Check& check : verify_artifact(folder / "b"))
      if (!check.passed) faults += check.name + ": " + check.detail + "\n";
    RC_ASSERT(faults == std::string{});
  });
}
