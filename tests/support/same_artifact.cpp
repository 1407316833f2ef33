#include "support/same_artifact.h"

#include <catch2/catch.hpp>

namespace kvq::test {

namespace {

void check_equal_sides(const TensorPlan& a, const TensorPlan& b) {
  const Rotation &x = a.rotation, &y = b.rotation;
  CHECK(x.kind == y.kind);
  CHECK(x.scope == y.scope);
  CHECK(x.order == y.order);
  CHECK(x.signs == y.signs);
  CHECK(x.matrix == y.matrix);
  CHECK(x.recipe == y.recipe);
  CHECK(x.target == y.target);
  CHECK(x.sign_choice == y.sign_choice);
  CHECK(x.eigenbasis == y.eigenbasis);
  CHECK(x.spectrum == y.spectrum);
  CHECK(a.center == b.center);
  CHECK(a.coder == b.coder);
  CHECK(a.clip_ratio == b.clip_ratio);
  REQUIRE(a.error.has_value() == b.error.has_value());
  if (!a.error) return;
  CHECK(a.error->metric == b.error->metric);
  CHECK(a.error->before == b.error->before);
  CHECK(a.error->after == b.error->after);
  CHECK(a.error->baseline == b.error->baseline);
}

}  // namespace

void check_equal(const LayerPlan& a, const LayerPlan& b) {
  INFO("layer " << a.layer);
  CHECK(a.layer == b.layer);
  CHECK(a.geometry == b.geometry);
  check_equal_sides(a.k, b.k);
  REQUIRE(a.v.has_value() == b.v.has_value());
  if (a.v) check_equal_sides(*a.v, *b.v);
}

void check_equal(const Artifact& a, const Artifact& b) {
  CHECK(a.model.name == b.model.name);
  CHECK(a.model.fingerprint == b.model.fingerprint);
  CHECK(a.model.num_layers == b.model.num_layers);
  CHECK(parse_json(a.model.config_json, "a") == parse_json(b.model.config_json, "b"));
  CHECK(a.calibration.method == b.calibration.method);
  CHECK(a.calibration.tool == b.calibration.tool);
  CHECK(a.calibration.dump_hash == b.calibration.dump_hash);
  CHECK(a.calibration.dump_producer == b.calibration.dump_producer);
  CHECK(a.calibration.capture_point == b.calibration.capture_point);
  CHECK(a.calibration.tokens == b.calibration.tokens);
  CHECK(a.calibration.sequences == b.calibration.sequences);
  CHECK(a.calibration.seed == b.calibration.seed);
  CHECK(a.calibration.options == b.calibration.options);
  CHECK(a.windows == b.windows);
  REQUIRE(a.layers.size() == b.layers.size());
  for (std::size_t i = 0; i < a.layers.size(); ++i) check_equal(a.layers[i], b.layers[i]);
}

}  // namespace kvq::test
